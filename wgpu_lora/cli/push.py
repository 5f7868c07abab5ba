"""wgpu-lora push: an adapter or a model to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wgpu_lora.cli.console import console, line


def push(
    directory: Annotated[Path, typer.Argument(help="Directory of an adapter, a model or a GGUF file.", metavar="DIR")],
    repo: Annotated[str, typer.Argument(help="OWNER/NAME; made where there is none.")],
    private: Annotated[bool, typer.Option("--private", help="Only you see a repository that is made.")] = False,
    include: Annotated[
        list[str] | None, typer.Option(help="Send only files whose path matches this pattern; may be repeated.")
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Leave these out; may be repeated, and wins.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go, and send nothing.")] = False,
) -> int:
    """Send an adapter or a model to the Hugging Face hub, with its model card, in one commit.

    What goes is what others load: weights, configuration, tokenizer, card and licence. --include sends what it
    matches instead, as `hf buckets sync` has it ('*' stands for anything, slashes too), and a run's own state
    (checkpoints, run.json, log.jsonl) only if the pattern names it, as run.json does.
    """
    from rich.table import Table

    from wgpu_lora.formats.cards import CARD
    from wgpu_lora.formats.push import check_name
    from wgpu_lora.formats.push import push as send
    from wgpu_lora.formats.upload import prepare

    check_name(repo)
    upload = prepare(directory, include, exclude)
    for note in upload.notes:
        line("note", note)
    if not dry_run:
        address = send(upload, repo, private)
        line("sent", f"{upload.kind}, {upload.nbytes:,} bytes: {address}")
        return 0
    table = Table(box=None, pad_edge=False)
    table.add_column("file")
    table.add_column("bytes", justify="right")
    for name, (_, size) in upload.files.items():
        table.add_row(name, f"{size:,}")
    if upload.card:
        table.add_row(f"{CARD} (made, there is none)", f"{len(upload.card.encode()):,}")
    console().print(table)
    line("dry run", f"{upload.kind} in {directory} to {repo}, {upload.nbytes:,} bytes; nothing was sent")
    return 0
