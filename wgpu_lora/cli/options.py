"""Command-line options out of a dataclass's fields, so that commands that share them never repeat them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from wgpu_lora.errors import UserError
from wgpu_lora.train.arguments import PANELS, TrainingArguments, flag, gather

KINDS = {"str": str, "int": int, "float": float, "bool": bool}
RECIPE = "Flat TOML file of these options, or the name of a bundled recipe; options given here win over it."
MAY_BE_EMPTY = {"prompt", "system"}  # an empty prompt has a message of its own, an empty system message is one
OF_SEVERAL = ("schedule", "batch_tokens")  # options of a pipeline alone
# Options that several commands have.
Model = Annotated[str | None, typer.Option(help="Model directory, GGUF file, hub id, or 'demo' (the default).")]
Adapter = Annotated[
    list[str] | None,
    typer.Option(
        help="PEFT adapter directory, without which the base model answers; may be given several times.",
        metavar="[NAME=]DIR",
    ),
]
Device = Annotated[
    str | None, typer.Option(help="Adapter index or a part of its name, as 'wgpu-lora info' lists them.")
]
BaseDtype = Annotated[str, typer.Option(help="How the frozen weights are kept: nf4, bf16, f16 or f32.")]
AllowUnconfined = Annotated[
    bool,
    typer.Option("--allow-unconfined", help="Run the model's code even where this system cannot confine it."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


class Command(TyperCommand):
    """A command that takes an empty value for a mistake, such as a shell's unset variable leaves."""

    def invoke(self, ctx: Any) -> Any:
        for name, value in ctx.params.items():
            if isinstance(value, str) and not value.strip() and name not in MAY_BE_EMPTY:
                raise UserError(f"{flag(name)} is empty: give it a value, or leave it out.")
        return super().invoke(ctx)


class GroupedHelp(Command):
    """A command whose help lists its options under headings, one column, nothing cut off on a narrow terminal.

    --wait may be given without a number, which stands for 0.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        following = [*args[1:], "-"][: len(args)]
        bare = [
            arg == "--wait" and after.startswith("-") and not after[1:2].isdigit()
            for arg, after in zip(args, following, strict=True)
        ]
        return super().parse_args(ctx, [f"{a}=0" if is_bare else a for a, is_bare in zip(args, bare, strict=True)])

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record:
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or "Other", []).append(record)
        for title, records in panels.items():
            with formatter.section(title):
                formatter.write_dl(records)


def training_options(run: Callable[..., int]) -> Callable[..., int]:
    """A command of `run(args: TrainingArguments, note: str | None, ...)` with an option for every training argument.

    `note` says which recipe the options come from, where there is one. Further parameters become further options.
    """
    names = [f.name for f in fields(TrainingArguments)]

    def command(ctx: typer.Context, recipe: str | None, **values: Any) -> int:
        given = {name: values.pop(name) for name in names if is_given(ctx, name)}
        own_data = any(values.get(name) for name in ("adapters", "adapters_config"))
        if not own_data:
            refuse_idle(ctx, OF_SEVERAL, "without --adapters or --adapters-config")
        args, path = gather(given, recipe, "The command line", demo=not own_data)
        note = None
        if path is not None:
            note = f"{path}" if recipe else f"{path} (the demo, since neither --data nor --recipe is given)"
        return run(args, note, **{name: value for name, value in values.items() if name not in names})

    own = list(inspect.signature(run, eval_str=True).parameters.values())[2:]
    parameters = [
        _parameter("ctx", typer.Context, inspect.Parameter.empty),
        _parameter("recipe", Annotated[str | None, typer.Option(help=RECIPE, rich_help_panel=PANELS[0])], None),
        *map(_option, sorted(fields(TrainingArguments), key=lambda f: PANELS.index(f.metadata["panel"]))),
        *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own),
    ]
    command.__name__, command.__doc__ = run.__name__, run.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _option(item: Any) -> inspect.Parameter:
    kinds = [part.strip() for part in str(item.type).split("|")]
    kind: Any = KINDS[kinds[0]]
    name = flag(item.name)
    # A switch that is off has its opposite too: a recipe may have turned it on.
    declared = f"{name}/--no-{name[2:]}" if kind is bool else name
    said = item.default is not None and item.default is not False
    settings = typer.Option(
        declared, help=item.metadata["help"], rich_help_panel=item.metadata["panel"], show_default=said
    )
    return _parameter(item.name, Annotated[kind | None if "None" in kinds else kind, settings], item.default)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def is_given(ctx: typer.Context, name: str) -> bool:
    """Whether the command line says it, be it what it is by default."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_idle(ctx: typer.Context, names: Collection[str], where: str) -> None:
    """Raises UserError where the command line gives any of these options, which would do nothing.

    where: with what, such as 'with --list'.
    """
    given = [p for p in ctx.command.params if p.name in names and is_given(ctx, p.name)]
    found = ["/".join((*p.opts, *p.secondary_opts)) for p in given]
    if found:
        does, it = ("does", "it") if len(found) == 1 else ("do", "them")
        raise UserError(f"{' and '.join(found)} {does} nothing {where}: leave {it} out.")
