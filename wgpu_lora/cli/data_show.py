"""wgpu-lora data show: rows as the model gets them."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wgpu_lora.cli.console import line, print_json
from wgpu_lora.cli.options import Json
from wgpu_lora.errors import UserError
from wgpu_lora.train.options.arguments import TrainingArguments
from wgpu_lora.words import counted

if TYPE_CHECKING:
    from wgpu_lora.train.row_preview import RowPreview, Token

PARTS = {1: ("row",), 2: ("chosen", "rejected")}  # names of a sample's sequences, by how many it has


def show(
    args: TrainingArguments,
    note: str | None,
    row: Annotated[
        list[int] | None,
        typer.Option(help="Number of a row, from 1; may be repeated. By default the first three. [x>=1]"),
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="List every token on a line of its own.")] = False,
    as_json: Json = False,
) -> int:
    """Show rows as the model gets them: their text, its token ids, and which of them are trained on.

    The options are those of 'finetune'. What the chat template leaves out of a row is named. No device is used.
    """
    from wgpu_lora.formats.hub import resolve_model
    from wgpu_lora.models.files import read_model
    from wgpu_lora.train.finetune import with_demo_data
    from wgpu_lora.train.objectives import objective_of
    from wgpu_lora.train.row_preview import preview_rows
    from wgpu_lora.train.rows import sources_of

    if any(number < 1 for number in row or ()):
        raise UserError("--row counts from 1: give a larger number.")
    args = with_demo_data(args)
    source, numbers = sources_of(args)[0], set(row or ())
    found = list(preview_rows(args, read_model(resolve_model(args.model or "demo")), source, numbers))
    if len(found) < len(numbers):
        raise UserError(f"{source.called} has fewer than {max(numbers):,} rows: give a smaller number for --row.")
    if as_json:
        print_json([_as_json(one) for one in found])
        return 0
    if note:
        line("recipe", note)
    for one in found:
        _show(one, PARTS[objective_of(args).parts], tokens)
    return 0


def _show(found: RowPreview, parts: tuple[str, ...], listed: bool) -> None:
    from wgpu_lora.train.row_preview import segments

    print(f"{found.place}", flush=True)
    for number, tokens in enumerate(found.rows):
        trained = sum(token.trained for token in tokens)
        line(parts[number % len(parts)], f"{counted(len(tokens), 'token')}, {trained:,} trained on")
        for is_trained, run in segments(tokens):
            mark = "trained" if is_trained else "context"
            if listed:
                for token in run:
                    line(mark, f"{token.id:>7} {token.text!r}")
            else:
                line(mark, _text(run), whole=True)
                line("", " ".join(str(token.id) for token in run))
    for text in found.notes:
        line("note", text)
    if found.refusal:
        line("refused", found.refusal)


def _text(run: list[Token]) -> str:
    return repr("".join(token.text for token in run))


def _as_json(found: RowPreview) -> dict[str, Any]:
    from wgpu_lora.train.row_preview import segments

    rows = [
        {
            "tokens": [asdict(token) for token in tokens],
            "segments": [
                {"trained": trained, "text": "".join(token.text for token in run)} for trained, run in segments(tokens)
            ],
        }
        for tokens in found.rows
    ]
    return {found.place.unit: found.place.number, "rows": rows, "notes": found.notes, "refused": found.refusal}
