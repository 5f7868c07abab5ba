"""wgpu-lora push: an adapter or a model to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wgpu_lora.bounded import printable
from wgpu_lora.cli.console import console, line


def push(
    directory: Annotated[Path, typer.Argument(help="Directory of an adapter, a model or a GGUF file.", metavar="DIR")],
    repo: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository; created if it does not exist.")],
    public: Annotated[
        bool, typer.Option("--public/--private", help="Visibility of a repository that is created.")
    ] = False,
    include: Annotated[
        list[str] | None, typer.Option(help="Upload only files whose path matches this pattern; may be repeated.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Leave out matching files; may be repeated, and overrides --include.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be uploaded.")] = False,
) -> int:
    """Upload an adapter or a model to the Hugging Face hub.

    By default, the files needed to load it are uploaded, by exact names: weights, configuration, tokenizer, model card
    and licence; --dry-run states the reason for each file. --include uploads matching files instead, with the patterns
    of `hf buckets sync` ('*' matches anything, including slashes); a run's own state (checkpoints, run.json, log.jsonl)
    is only included if the pattern names it, as run.json does.
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
        line("uploaded", f"{upload.kind}, {upload.nbytes:,} bytes: {address}")
        return 0
    table = Table(box=None, pad_edge=False)
    table.add_column("file")
    table.add_column("bytes", justify="right")
    table.add_column("why")
    for name, (_, size) in upload.files.items():
        table.add_row(Text(printable(name)), f"{size:,}", Text(printable(upload.reasons[name])))
    if upload.card:
        table.add_row(CARD, f"{len(upload.card.encode()):,}", "model card, generated since there is none")
    console().print(table)
    made = "public" if public else "private"
    line(
        "dry run",
        f"{upload.kind} in {directory} to {repo} ({made} if created), {upload.nbytes:,} bytes; nothing was uploaded",
    )
    return 0
