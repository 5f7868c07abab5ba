"""Base classes of commands: other names of options, typing errors, and the layout of help."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperGroup

from wgpu_lora.errors import UserError
from wgpu_lora.files.paths import check_links, is_path
from wgpu_lora.gpu.backends import BACKENDS, DAWN, ENVIRONMENT, check_backend
from wgpu_lora.names.aliases import advice, aliases_of, foreign_option_advice
from wgpu_lora.names.foreign_options import COMMANDS
from wgpu_lora.names.spelling import flag
from wgpu_lora.train.objectives import OBJECTIVES

MAY_BE_EMPTY = {"prompt", "system"}  # an empty prompt has its own error, an empty system message is allowed
TRUE, FALSE = ("true", "yes"), ("false", "no")
# In a context's `meta`, by parameter: the name and the value given, and values of `Command.declared`.
USED, TYPED, DECLARED = "wgpu_lora.used", "wgpu_lora.typed", "wgpu_lora.declared"
ONE = {"data", "eval_data"}  # a second value would silently replace the first
SEVERAL = {"report_to"}  # several values are a list
MORE = 4  # maximum sentences about further options of other programs
OPTIONS = "Options"  # heading of options without one
DATA = (".jsonl", ".json", ".csv", ".parquet", ".txt")


def dashes(name: str) -> str:
    """An option's or a command's name, with dashes."""
    return name.replace("_", "-")


class Command(TyperCommand):
    """A command that knows other programs' names of its options, and turns every mistake into a UserError.

    Underscores may replace dashes (`token_normalize_func` of the root), and a switch may be followed by true or false.
    An empty value is an error, since an unset shell variable causes it. Beside `--device`, a command has `--backend`.

    Attributes:
        declared: parameters that are no arguments of the command's function; their values are in the context's `meta`.
    """

    declared: Sequence[Any] = ()

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        for place, parameter in enumerate(self.params):
            if parameter.name == "device" and parameter.param_type_name == "option":
                self.params.insert(place + 1, _backend_option(parameter))
                break

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True  # refused below, with advice
        typed = list(args)
        try:
            remaining = super().parse_args(ctx, list(self._canonical(ctx, args)))
        except Exception as error:
            name = _unknown_option(error)
            if name is not None:
                raise UserError(_unknown(name, typed, self._names(ctx), ctx.command_path)) from None
            text = self._wrong_value(ctx, error) or self._missing(ctx, error, typed)
            if text is None:
                raise
            raise UserError(text) from None
        if remaining and not ctx.resilient_parsing:
            raise UserError(self.extra(ctx, remaining[0]))
        return remaining

    def _canonical(self, ctx: Any, args: Sequence[str]) -> Iterator[str]:
        """The words of a command line with this command's names of its options, each value in the word of its option.

        Raises:
            UserError: an option is given under two names, or with a value too many.
        """
        options = {name: p for p in self.get_params(ctx) for name in (*p.opts, *p.secondary_opts) if name[:2] == "--"}
        aliases = aliases_of([name.removeprefix("--").replace("-", "_") for name in options])
        own = {f"--{no}{dashes(a)}": f"--{no}{dashes(name)}" for a, name in aliases.items() for no in ("", "no-")}
        used, values = ctx.meta.setdefault(USED, {}), ctx.meta.setdefault(TYPED, {})
        words = list(reversed(args))
        while words:
            word = words.pop()
            typed, equals, value = word.partition("=")
            name = own.get(dashes(typed), dashes(typed))
            option: Any = options.get(name)
            if option is None or word == "--":
                yield from [word, *(reversed(words) if word == "--" else ())]
                words = [] if word == "--" else words
                continue
            shown = dashes(typed).removeprefix("--")
            shown = shown.removeprefix("no-") if name in option.secondary_opts else shown
            if (first := used.setdefault(option.name, shown)) != shown and not ctx.resilient_parsing:
                raise UserError(f"--{first} and --{shown} are the same option: leave one out.")
            if option.is_flag:
                yield from _switch(option, name, equals, words)
                values[option.name] = name
            elif not (equals or words):
                if not ctx.resilient_parsing:  # completion asks for the value
                    raise UserError(f"--{shown} requires an argument.")
                yield name
            else:
                value = value if equals else words.pop()
                before = values.get(option.name, value)
                if before != value and option.name in ONE and not ctx.resilient_parsing:
                    both = f"{before} and {value}"
                    raise UserError(f"{flag(option.name)} takes one value, not both {both}: leave one out.")
                values[option.name] = f"{before},{value}" if before != value and option.name in SEVERAL else value
                yield f"{name}={values[option.name]}"

    def extra(self, ctx: Any, word: str) -> str:
        """The error for a word that belongs to no option."""
        return _extra(word, self._names(ctx), ctx.meta[TYPED], ctx.command_path)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Required arguments without the braces that Typer puts around them."""
        return [re.sub(r"^\{(.+)\}", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]

    def _wrong_value(self, ctx: Any, error: Exception) -> str | None:
        """The error for a value that is no number of the option's type; None for other errors, such as of its range."""
        option = getattr(getattr(error, "param", None), "name", "")
        value = ctx.meta[TYPED].get(option)
        if not isinstance(value, str) or re.fullmatch(r"\s*[+-]?\d+\s*", value):
            return None
        return f"{flag(option)} must be a {'whole ' if _is_number(value) else ''}number, not {value!a:.80}."

    def _missing(self, ctx: Any, error: Exception, args: list[str]) -> str | None:
        """The error for a missing option, if a word of the command line may be its value; else None."""
        name = getattr(getattr(error, "param", None), "name", "")
        phrase = f"did you mean {flag(name)} "
        words = [word for word in args if "Missing" in type(error).__name__ and not word.startswith("-")]
        messages = [self.extra(ctx, word) for word in words]
        return next((text for text in messages if phrase in text), None)

    def invoke(self, ctx: Any) -> Any:
        for name, value in ctx.params.items():
            if isinstance(value, str) and not value.strip() and name not in MAY_BE_EMPTY:
                raise UserError(f"{flag(name)} is empty: give it a value, or leave it out.")
            for item in value if isinstance(value, list | tuple) else [value]:
                if name not in MAY_BE_EMPTY and isinstance(item, str | Path) and is_path(str(item)):
                    check_links(Path(item))
        ctx.meta[DECLARED] = {parameter.name: ctx.params.pop(parameter.name) for parameter in self.declared}
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write options under their headings, in one column that is not cut off on a narrow terminal."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record:
                left, right = record
                record = re.sub(r"<list\[(\w+)\]>", lambda match: f"<{match[1].lower()}>", left), right
                default = "Arguments" if parameter.param_type_name == "argument" else OPTIONS
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or default, []).append(record)
        for title, records in sorted(panels.items(), key=lambda panel: panel[0] == OPTIONS):  # last
            with formatter.section(title):
                formatter.write_dl(records)

    def _names(self, ctx: Any) -> list[str]:
        flags = [name for p in self.get_params(ctx) for name in (*p.opts, *p.secondary_opts) if name.startswith("--")]
        return [name.removeprefix("--").replace("-", "_") for name in flags]


class Group(TyperGroup):
    """A group of commands; the error for an unknown command names what to use instead."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not (args or self.invoke_without_command or ctx.resilient_parsing):
            raise UserError(
                f"'{ctx.command_path}' needs a command: {', '.join(self.commands)} ('{ctx.command_path} --help')."
            )
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            name = dashes(_unknown_option(error) or "")
            if not name:
                raise
            commands = [
                c for c, command in self.commands.items() for p in getattr(command, "params", ()) if name in p.opts
            ]
            if commands:
                raise UserError(
                    f"{name} comes after a command, such as '{ctx.command_path} {commands[0]} {name} ...'."
                ) from None
            raise UserError(f"No such option: {name}; '{ctx.command_path} --help' lists the commands.") from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = dashes(args[0])
        if name in self.commands or ctx.resilient_parsing or name.startswith("-"):
            return super().resolve_command(ctx, args)
        raise UserError(unknown_command(args[0], list(self.commands), ctx.command_path))


def _backend_option(device: Any) -> Any:
    """`--backend`, made from `--device`: of this process and those that it starts, so it is in the environment."""
    result = copy(device)
    result.name, result.opts, result.secondary_opts = "backend", ["--backend"], []
    result.metavar, result.expose_value = "|".join(BACKENDS), False
    result.help = (
        f"WebGPU implementation: wgpu-native or, with 'wgpu-lora[{DAWN}]', Dawn, which has matrix units. auto: Dawn "
        "where it is installed and computes them right."
    )

    def choose(_context: Any, _option: Any, value: str | None) -> None:
        if value is not None:
            check_backend(value)
            os.environ[ENVIRONMENT] = value

    result.callback = choose
    return result


def _switch(option: Any, name: str, value: str, words: list[str]) -> list[str]:
    """A switch as its parser takes it. words: that follow, the next one last; a true or false is taken off."""
    others = option.opts if name in option.secondary_opts else option.secondary_opts
    if value:
        raise UserError(f"{name} takes no value: give {name}{f' or {others[0]}' if others else ' or leave it out'}.")
    following = words[-1].lower() if words else ""
    if following in (*TRUE, *FALSE):
        words.pop()
    return list(others[:1]) if following in FALSE else [name]  # off is the default of those without an opposite


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _unknown_option(error: Exception) -> str | None:
    """The option that Typer reports as unknown; None for other errors."""
    return str(getattr(error, "option_name", "")) if hasattr(error, "possibilities") else None


def unknown_command(typed: str, choices: Sequence[str], group: str) -> str:
    """The error for a command that a group does not have."""
    name = dashes(typed.lower())
    foreign = {word: command for words, command in COMMANDS.items() for word in words.split()}
    foreign |= {objective: f"finetune --objective {objective}" for objective in OBJECTIVES if objective not in foreign}
    words = [*choices, *({} if " " in group else foreign)]
    suggestion = next(iter([name] if name in words else difflib.get_close_matches(name, words, n=1, cutoff=0.75)), "")
    if suggestion in choices or len(choices) == 1:
        return f"No such command '{typed:.40}': did you mean '{group} {suggestion or choices[0]}'?"
    if suggestion:
        command, comma, remark = foreign[suggestion].partition(",")
        return f"No such command '{typed:.40}': use '{group} {command}'{comma}{remark}."
    return f"No such command '{typed:.40}': choose one of {', '.join(choices)} ('{group} --help')."


def _unknown(typed: str, args: list[str], options: list[str], command: str) -> str:
    """The error for an option that a command does not have."""
    name, otherwise = typed.lstrip("-").replace("-", "_"), f"'{command} --help' lists the options."
    if not typed.startswith("--"):  # after a single dash, Typer names the first letter only
        argument = next((arg for arg in args if arg.startswith(typed)), typed)
        name = argument.lstrip("-").split("=")[0].replace("-", "_")
        if name in options or name in aliases_of(options):
            return f"No such option: {argument}; options start with two dashes, as in {flag(name)}."
        typed = argument
    message = foreign_option_advice(name, options)
    if not message:
        return f"No such option: {typed}; {advice(name, options, otherwise)}"
    # A line written for another program may have several such options: name them all.
    words = dict.fromkeys(arg[2:].split("=")[0].replace("-", "_") for arg in args if arg.startswith("--"))
    names = {*options, *aliases_of(options), name}
    texts = [text for word in words if word not in names and (text := foreign_option_advice(word, options))]
    return " ".join(
        [message, *texts[:MORE], *([f"{len(texts) - MORE} more do not exist."] if len(texts) > MORE else [])]
    )


def _is_module(word: str) -> bool:
    from wgpu_lora.models.architectures import module_names

    return word in module_names()


def _extra(word: str, options: list[str], values: dict[str, Any], command: str) -> str:
    """The error for a word that belongs to no option.

    values: of the options that were given, by their parameters' names.
    """
    suggestion, modules = "", values.get("target_modules")
    if modules and _is_module(word):
        return f"'{word}' belongs to no option of '{command}': did you mean {flag('target_modules')} {modules},{word}?"
    if word.lower().endswith(DATA) or os.path.isfile(os.path.join(word, "train.jsonl")):
        suggestion = "data"
    elif word.lower().endswith((".toml", ".yaml", ".yml")):
        suggestion = "recipe"
    elif "resume" in values and os.path.isdir(word):
        suggestion = "output"
    elif os.path.isfile(os.path.join(word, "adapter_config.json")):
        suggestion = "adapter"
    elif word.lower().endswith(".gguf") or os.path.isfile(os.path.join(word, "config.json")):
        suggestion = "model"
    elif "prompt" in options:
        suggestion = "prompt"
    where = f"'{word:.60}' belongs to no option of '{command}'"
    if suggestion in values:
        return f"{where}: {flag(suggestion)} takes one value, and already is {values[suggestion]!s:.60}."
    if suggestion in options:
        quotation = f"'{word:.60}'" if " " in word else f"{word:.60}"
        return f"{where}: did you mean {flag(suggestion)} {quotation}?"
    return f"{where}: '{command} --help' lists the options."
