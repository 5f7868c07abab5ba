"""wgpu-lora push: an adapter or a model to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wgpu_lora.bounded import printable
from wgpu_lora.cli.console import console, line


def push(
    directory: Annotated[Path, typer.Argument(help="Directory of an adapter, a model or a GGUF file.", metavar="DIR")],
    repo: Annotated[str, typer.Argument(help="OWNER/NAME; made where there is none.")],
    public: Annotated[
        bool, typer.Option("--public/--private", help="Whether everybody sees a repository that is made.")
    ] = False,
    include: Annotated[
        list[str] | None, typer.Option(help="Send only files whose path matches this pattern; may be repeated.")
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Leave these out; may be repeated, and wins.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go, and send nothing.")] = False,
) -> int:
    """Send an adapter or a model to the Hugging Face hub.

    What goes is what others load, by exact names: weights, configuration, tokenizer, card and licence; --dry-run says
    why each file does. --include sends what it matches instead, as `hf buckets sync` has it ('*' stands for anything,
    slashes too), and a run's own state (checkpoints, run.json, log.jsonl) only if the pattern names it, as run.json
    does.
    """
    from rich.table import Table
    from rich.text import Text

    from wgpu_lora.formats.cards import CARD
    from wgpu_lora.formats.push import check_name
    from wgpu_lora.formats.push import push as send
    from wgpu_lora.formats.upload import prepare

    check_name(repo)
    upload = prepare(directory, include, exclude)
    for note in upload.notes:
        line("note", note)
    if not dry_run:
        address = send(upload, repo, private=not public)
        line("sent", f"{upload.kind}, {upload.nbytes:,} bytes: {address}")
        return 0
    table = Table(box=None, pad_edge=False)
    table.add_column("file")
    table.add_column("bytes", justify="right")
    table.add_column("why")
    for name, (_, size) in upload.files.items():
        table.add_row(Text(printable(name)), f"{size:,}", Text(printable(upload.reasons[name])))
    if upload.card:
        table.add_row(CARD, f"{len(upload.card.encode()):,}", "model card, made as there is none")
    console().print(table)
    made = "public" if public else "private"
    line(
        "dry run",
        f"{upload.kind} in {directory} to {repo} ({made} if it is made), {upload.nbytes:,} bytes; nothing was sent",
    )
    return 0
