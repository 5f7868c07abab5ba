"""wgpu-lora protect policy: a policy from reference values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wgpu_lora.cli.parameters import Device


def policy(
    source: Annotated[
        Path,
        typer.Argument(metavar="JOB|EVIDENCE", help="A job, to run on this machine, or a trainer's evidence (.json)."),
    ],
    strict: Annotated[
        bool, typer.Option("--strict", help="Pin every digest and release, so that each update needs a new policy.")
    ] = False,
    device: Device = None,
) -> int:
    """Print a policy that accepts one job on one machine, to be read and edited by the owner of the data.

    Every rule is explained in docs/protected-policy.md. From evidence, its claims become the reference values: check
    them first. What is not known, or not so on that machine, is a comment.
    """
    from wgpu_lora.protect.extra import check_libraries

    check_libraries()
    from wgpu_lora.protect.policies.template import policy_for
    from wgpu_lora.protect.runs.reference import reference_claims

    claims, quote = reference_claims(source, device)
    typer.echo(policy_for(claims, quote, strict), nl=False)
    return 0
