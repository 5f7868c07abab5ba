"""wgpu-lora protect open: open what was sealed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from wgpu_lora.cli.console import line


def open_sealed(
    sealed: Annotated[str, typer.Argument(metavar="SEALED", help="Sealed file; - for standard input.")],
    key: Annotated[Path, typer.Option(metavar="FILE", help="Data key of one of its recipients.")],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="New file, or new directory for NAME.tar.age (unless named *.tar); - for standard output.",
        ),
    ],
) -> int:
    """Open a sealed file or directory, and write it in the clear.

    Nothing is left if it is damaged or incomplete, or if the key does not open it. Standard output gets each chunk of
    64 KiB as soon as it has been authenticated, so use what it got only if the exit code is 0.
    """
    from wgpu_lora.protect.extra import check_libraries

    check_libraries()
    from wgpu_lora.protect.hygiene.host import harden
    from wgpu_lora.protect.sealed.keys import DataKey
    from wgpu_lora.protect.sealed.pipes import open_to

    harden()
    data_key = DataKey.read(key)
    try:
        open_to(sealed, output, data_key, sys.stdin, sys.stdout)
    finally:
        data_key.wipe()
    if output != "-":
        line("opened", output)
    return 0
