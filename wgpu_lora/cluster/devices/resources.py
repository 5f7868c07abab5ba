"""Devices as custom resources of a Ray node."""

from __future__ import annotations

from collections.abc import Iterable

from wgpu_lora.cluster.facts import DeviceFacts


def advertised(devices: Iterable[DeviceFacts]) -> dict[str, float]:
    """What a node says it has, for `ray start --resources`: one of each device."""
    return {device.key: 1.0 for device in devices}
