"""wgpu-lora cluster resources: the devices of this machine, as `ray start` takes them."""

from __future__ import annotations

from wgpu_lora.cli.console import print_json


def resources() -> None:
    """Print this machine's devices for 'ray start --resources', as JSON.

    A node that is started by hand belongs to the cluster with its devices by:
    ray start --address HOST:PORT --resources "$(wgpu-lora cluster resources)"
    """
    from wgpu_lora.cluster.devices.probe import node_devices
    from wgpu_lora.cluster.devices.resources import advertised

    print_json(advertised(node_devices("")))
