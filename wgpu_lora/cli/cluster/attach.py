"""wgpu-lora cluster attach: come back to a run."""

from __future__ import annotations

from typing import Annotated

import typer

from wgpu_lora.cli.cluster.options import Address, ClusterToml, Here

Run = Annotated[str | None, typer.Argument(metavar="[RUN]", help="Name of the run; needed only if several go on.")]


def attach(run: Run = None, address: Address = None, file: ClusterToml = None, local: Here = False) -> int:
    """Show a run that goes on, and fetch what has ended meanwhile."""
    from wgpu_lora.cluster.extra import check_ray

    check_ray()
    from wgpu_lora.cli.cluster.running import attach_to
    from wgpu_lora.cluster.client.connect import target

    return attach_to(target(address, file, local), run)
