"""Command-line options created from the fields of a dataclass, so that commands share them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from dataclasses import fields, replace
from functools import cache
from glob import escape, glob
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from wgpu_lora.cli.command import DECLARED, OPTIONS, Command
from wgpu_lora.errors import UserError
from wgpu_lora.files.assets import asset_dir
from wgpu_lora.train.option_types import FOREVER, kinds
from wgpu_lora.train.options.training_arguments import PANELS, TrainingArguments
from wgpu_lora.train.options.unused_options import unused_options
from wgpu_lora.train.resolve_options import resolve_options
from wgpu_lora.weights.base_formats import CHOICES

Completer = Callable[[str], list[Any]]  # the incomplete word -> values, or (value, help)


def dashed(words: str) -> str:
    """A command line to complete, with dashes in its options where underscores were typed."""
    return re.sub(r"(?<!\S)--[\w-]+", lambda option: option[0].replace("_", "-"), words)


def one_of(values: Iterable[str]) -> Completer:
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def number(default: Any, within: object) -> Completer:
    """The default of a number, with its range as the help that some shells show."""
    return lambda incomplete: [] if default is None else [(str(default), str(within or "the default"))]


def or_files(values: Callable[[], Sequence[str]]) -> Completer:
    """Names, and files beside them; if there are only files, the shell completes them, which it does better."""

    def complete(incomplete: str) -> list[Any]:
        result = [value for value in values() if value.startswith(incomplete)]
        if not result:
            return []
        files = sorted(glob(f"{escape(incomplete)}*"))
        return [*result, *(f"{path}/" if Path(path).is_dir() else path for path in files)]

    return complete


def bundled(directory: str) -> list[str]:
    """The names of the TOML files in a directory of the package."""
    return sorted(path.stem for path in Path(str(asset_dir(directory))).glob("*.toml"))


def modules(incomplete: str) -> list[str]:
    """'all-linear', or names of linear layers separated by commas."""
    before, comma, last = incomplete.rpartition(",")
    from wgpu_lora.models.architectures import module_names

    matching = [name for name in module_names() if name not in before.split(",") and name.startswith(last)]
    all_linear = [] if comma else one_of(["all-linear"])(incomplete)
    return [*all_linear, *(f"{before}{comma}{name}" for name in matching)]


def bricks(incomplete: str) -> list[str]:
    return one_of(bundled("bricks"))(incomplete)


def shapes(incomplete: str) -> list[str]:
    from wgpu_lora.models.published_shapes import SHAPES

    return [name for name in SHAPES if name.startswith(incomplete)]


MODEL = or_files(lambda: ["demo", "smollm2"])
RECIPES = or_files(lambda: bundled("recipes"))
# For training options whose values are neither choices nor numbers.
BY_NAME: dict[str, Completer] = {
    "model": MODEL,
    "target_modules": modules,
    "memory_budget": one_of(["2GiB", "4GiB", "8GiB", "12GiB", "16GiB", "24GiB"]),
}


KINDS = {"str": str, "int": int, "float": float, "bool": bool}
RECIPE = "Flat TOML file of these options, or the name of a bundled recipe; options given here override it."
OF_SEVERAL = ("schedule", "batch_tokens")  # options of a pipeline only
MOST, REST = "Most common options", "More"
# In the order of the help.
MOST_USED = (
    "model",
    "data",
    "output",
    "eval_data",
    "lora_r",
    "learning_rate",
    "num_train_epochs",
    "per_device_train_batch_size",
    "max_length",
    "resume",
)


def choice(text: str, values: Collection[str], **settings: Any) -> Any:
    """An option whose value is one of several names."""
    return typer.Option(help=text, metavar="|".join(values), autocompletion=one_of(values), **settings)


THINKING = "Have the chat template ask for reasoning or, if off, rule it out."
# Options shared by several commands.
Model = Annotated[
    str | None,
    typer.Option(
        help="Model directory, GGUF file, hub id, 'smollm2' or 'demo'; by default the adapter's base model, or 'demo'.",
        autocompletion=MODEL,
    ),
]
Adapter = Annotated[
    list[str] | None,
    typer.Option(
        help="PEFT adapter directory; may be given several times. Without it, the base model is used.",
        metavar="[NAME=]DIR",
    ),
]
Device = Annotated[str | None, typer.Option(help="Device index or part of its name; 'wgpu-lora info' lists them.")]
BaseDtype = Annotated[
    str,
    choice(
        "Storage type of the frozen base weights; auto: that of a GGUF file or a packed model, else nf4. Low-bit ones "
        "also by group and mixed, such as lut2-g16 and q2a4.",
        CHOICES,
    ),
]
AllowUnconfined = Annotated[
    bool,
    typer.Option("--allow-unconfined", help="Run the model's code even if this system cannot confine it."),
]
Goal = Annotated[str | None, typer.Option(help="What this is for, in the run log ('wgpu-lora runs').")]
Notes = Annotated[str | None, typer.Option(help="Notes, in the run log.")]
InRunLog = Annotated[bool, typer.Option("--run-log/--no-run-log", help="Record this in the run log.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class TrainingCommand(Command):
    """A command with all training options: --help shows the most common ones, --help-all all of them.

    Its function gets them from `training_arguments`. --wait may be given without a number.

    Attributes:
        kinds: further dataclasses whose fields are options of the command.
    """

    most_used: ClassVar[Sequence[str]] = MOST_USED
    kinds: ClassVar[Sequence[type]] = ()

    def __init__(self, *args: Any, params: list[Any], **options: Any):
        *of_training, show_all = _declared_options(TrainingArguments)
        others, show_all = [p for kind in self.kinds for p in _declared_options(kind)], copy(show_all)
        self.declared = [*of_training, *others, show_all]
        count = len(self.declared) + len(params) - 1
        show_all.help = f"Show all {count} options: --recipe, --adapters, memory, batches, saving and so on."
        super().__init__(*args, params=[*of_training, *params, *others, show_all], **options)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        following = [*args[1:], "-"][: len(args)]
        bare = [
            arg == "--wait" and after.startswith("-") and not after[1:2].isdigit()
            for arg, after in zip(args, following, strict=True)
        ]
        return super().parse_args(
            ctx, [f"{a}={FOREVER:g}" if is_bare else a for a, is_bare in zip(args, bare, strict=True)]
        )

    def format_options(self, ctx: Any, formatter: Any) -> None:
        if ctx.params.get("help_all"):
            super().format_options(ctx, formatter)
            return
        by_name = {parameter.name: parameter for parameter in self.get_params(ctx)}
        common = {*(f.name for f in fields(TrainingArguments)), "recipe", "help_all", "help"}
        own = [p.get_help_record(ctx) for name, p in by_name.items()
               if name not in common and not getattr(p, "rich_help_panel", None)]  # fmt: skip
        if own := [record for record in own if record]:
            with formatter.section(OPTIONS):
                formatter.write_dl(own)
        with formatter.section(MOST):
            formatter.write_dl([by_name[name].get_help_record(ctx) for name in self.most_used])
        with formatter.section(REST):
            formatter.write_dl([by_name[name].get_help_record(ctx) for name in ("help_all", "help")])


@cache
def _declared_options(kind: type) -> list[Any]:
    """Options for the fields of a dataclass, as Typer has them; those of training between --recipe and --help-all."""
    items = fields(kind)
    parameters = [*map(_option_parameter, items)]
    if kind is TrainingArguments:
        panels = {item.name: PANELS.index(item.metadata["panel"]) for item in items}
        parameters.sort(key=lambda parameter: panels[parameter.name])
        recipe = typer.Option(help=RECIPE, rich_help_panel=PANELS[0], autocompletion=RECIPES)
        show_all = typer.Option("--help-all", is_eager=True, callback=_show_all, rich_help_panel=OPTIONS)
        parameters = [
            _parameter("recipe", Annotated[str | None, recipe], None),
            *parameters,
            _parameter("help_all", Annotated[bool, show_all], False),
        ]

    def command(**values: Any) -> None:
        """Has the parameters only."""

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app = typer.Typer(add_completion=False)
    app.command()(command)
    return list(typer.main.get_command(app).params)


def _show_all(ctx: typer.Context, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.params["help_all"] = True
        typer.echo(ctx.get_help())
        raise typer.Exit()


def given_options(ctx: typer.Context, kind: type = TrainingArguments) -> dict[str, Any]:
    """The options of a dataclass that the command line has."""
    return {f.name: ctx.meta[DECLARED][f.name] for f in fields(kind) if is_given(ctx, f.name)}


def recipe_of(ctx: typer.Context) -> str | None:
    """The recipe that the command line names."""
    return ctx.meta[DECLARED]["recipe"]


def training_arguments(ctx: typer.Context) -> tuple[TrainingArguments, str | None]:
    """The training options of a command line, and the recipe that they come from, if there is one, for people."""
    given, recipe, others = given_options(ctx), recipe_of(ctx), ctx.params
    several = bool(others.get("adapters") or others.get("adapters_config"))
    if not several:
        refuse_unused(ctx, OF_SEVERAL, "without --adapters or --adapters-config")
    resumed = several and given.get("resume")
    first = _first_checkpoint(others["adapters"], others["adapters_config"]) if resumed else None
    demo = not (several or others.get("shape"))
    args, path = resolve_options(given, recipe, "The command line", demo, first)
    if others.get("shape"):  # which stands for the model and the data of a recipe
        unset: dict[str, Any] = dict.fromkeys({"model", "data", "eval_data"} - given.keys())
        args = replace(args, **unset)
    warn_unused(given, args)
    if path is None or recipe:
        return args, str(path) if path else None
    return args, f"{path}: no --data is given, so the demo model is trained on its own data"


def warn_unused(names: Collection[str], args: TrainingArguments) -> None:
    """Print a note for each given option that does nothing."""
    for text in unused_options(names, args):
        typer.echo(f"wgpu-lora: note: {text}", err=True)


def _first_checkpoint(adapters: list[str] | None, adapters_config: Path | None) -> str:
    """Where the record of a resumed pipeline is, or a file that points to it."""
    from wgpu_lora.train.adapter_tasks import named_tasks

    return named_tasks(adapters or [], adapters_config)[0].checkpoint


def _option_parameter(item: Any) -> inspect.Parameter:
    """The parameter of a command for a declared field (`train.option_types.option`)."""
    parts, metadata = kinds(item), item.metadata
    kind: Any = KINDS[parts[0]]
    name = f"--{item.name.replace('_', '-')}"
    # A switch that is off by default has its opposite too, since a recipe may turn it on.
    declared = f"{name}/--no-{name[2:]}" if kind is bool else name
    within, choices = metadata["within"], metadata["choices"]
    unset = (None, within.unset if within else None)
    shows_default = item.default is not False and not any(
        item.default is value or item.default == value for value in unset
    )
    complete = BY_NAME.get(item.name)
    if choices:
        complete = one_of(choices)
    elif kind in (int, float):
        complete = number(item.default, within)
    settings = typer.Option(
        declared,
        help=f"{metadata['help']} [{within}]" if within else metadata["help"],
        metavar="|".join(choices) if choices else None,
        rich_help_panel=metadata["panel"],
        show_default=shows_default,
        autocompletion=complete,
    )
    return _parameter(item.name, Annotated[kind | None if "None" in parts else kind, settings], item.default)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def is_given(ctx: typer.Context, name: str) -> bool:
    """Whether the command line has the option, even with its default value."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_unused(ctx: typer.Context, names: Collection[str], where: str) -> None:
    """Raise UserError if the command line has any of these options, which would do nothing.

    where: the reason, such as 'with --list'.
    """
    parameters = [p for p in ctx.command.params if p.name in names and is_given(ctx, p.name)]
    result = ["/".join((*p.opts, *p.secondary_opts)) for p in parameters]
    if result:
        verb, pronoun = ("does", "it") if len(result) == 1 else ("do", "them")
        raise UserError(f"{' and '.join(result)} {verb} nothing {where}: leave {pronoun} out.")
