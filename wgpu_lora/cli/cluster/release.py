"""wgpu-lora cluster release: use a device again that failed repeatedly."""

from __future__ import annotations

from typing import Annotated

import typer

from wgpu_lora.cli.cluster.options import Address, ClusterToml, Here
from wgpu_lora.cli.console import line


def release(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="Its key, or HOST:INDEX, of 'cluster status'.")],
    address: Address = None,
    file: ClusterToml = None,
    local: Here = False,
) -> int:
    """Use a device again that was put aside because jobs failed on it."""
    from wgpu_lora.cluster.extra import check_ray

    check_ray()
    from wgpu_lora.cluster.client.connect import connected, target
    from wgpu_lora.cluster.client.follow import snapshot_of
    from wgpu_lora.cluster.client.status import chosen_device, place_of

    with connected(target(address, file, local)) as cluster:
        seen = snapshot_of(cluster)
        found = chosen_device(seen, device)
        cluster.coordinator("release", found.facts.id)
    line("released", f"{place_of(seen, found)}, {found.facts.name}")
    return 0
