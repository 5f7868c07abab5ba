"""wgpu-lora cluster cancel: end a run, or one adapter of it."""

from __future__ import annotations

from typing import Annotated

import typer

from wgpu_lora.cli.cluster.options import Address, ClusterToml, Here
from wgpu_lora.cli.console import line


def cancel(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, as 'cluster status' shows it.")],
    task: Annotated[str | None, typer.Argument(metavar="[ADAPTER]", help="Only this adapter of it.")] = None,
    address: Address = None,
    file: ClusterToml = None,
    local: Here = False,
) -> int:
    """End a run, or one adapter of it. What was trained until the last checkpoint can still be fetched by 'attach'."""
    from wgpu_lora.cluster.extra import check_ray

    check_ray()
    from wgpu_lora.cluster.client.connect import connected, target

    with connected(target(address, file, local)) as cluster:
        cluster.coordinator("cancel", run, task)
    line("cancelled", f"{run}, {task}" if task else run)
    return 0
