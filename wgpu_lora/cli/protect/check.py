"""wgpu-lora protect check: a protected run's evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wgpu_lora.cli.console import line, print_json
from wgpu_lora.protect.extra import check_libraries


def check(
    run: Annotated[Path, typer.Argument(help="Output directory of a protected run.", metavar="RUN")],
    broker_key: Annotated[
        Path | None, typer.Option(help="The broker's public key, whose signature endorses the run's keys.")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(help="Policy under which the key was released; the evidence is appraised again.")
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="Directory of the opened adapter, to verify its signature and files.")
    ] = None,
    json: Annotated[bool, typer.Option(help="Print JSON.")] = False,
) -> int:
    """Verify the evidence of a protected run, offline.

    Verifies the log's chain and signatures, each session's attestation and release, the sealed files, the cleanup
    record, the final statement and, if it is given, the opened adapter. Says which parts fail; else, in one line, what
    is proven and what is only claimed. Without the broker's key nothing is proven about who ran it. The exit code is 1
    if a part fails.
    """
    check_libraries()
    from wgpu_lora.protect.checking.check import check as check_run
    from wgpu_lora.protect.policies.policy import Policy
    from wgpu_lora.protect.sealed.keys import PublicKey

    found = check_run(
        run,
        PublicKey.read(broker_key) if broker_key else None,
        Policy.read(policy) if policy else None,
        adapter,
    )
    if json:
        print_json(found.to_json())
    else:
        for sentence in found.failures:
            line("failed", sentence)
        line("failed" if not found.verified else "verified" if broker_key else "unproven", found.line())
    return 0 if found.verified else 1
