"""The job `speed`: the brick `device_speed` in a few seconds, without its checks and the device's ceilings."""

from __future__ import annotations

import os
from typing import Any

from wgpu_lora.bench.brick import Context
from wgpu_lora.bench.bricks.device_speed import DeviceSpeed
from wgpu_lora.cluster.worker.job_process import EventWriter
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.memory_leases import Ledger, claim, device_key

TURNS = 2  # at least


def run(
    port: EventWriter,
    *,
    device: str | int | None = None,
    shape: str = "tiny-qwen3",
    layers: int = 2,
    tokens: int = 384,
    seconds: float = 3.0,
) -> dict[str, Any]:
    """The figures of the brick, and `beside`: who else held memory of the device before or after. The shape is the same
    for all devices, so that their figures can be compared."""
    context = Context.of(Device(device), shape, None, layers, tokens=tokens)
    ledger = Ledger(device_key(context.device.info))
    before, workload = _other_owners(ledger), DeviceSpeed(context)
    with claim(context.device, workload.nbytes(), "measuring the device's speed"):
        try:
            workload.open()
            figures = workload.measure(TURNS, seconds)
        finally:
            workload.close()
            context.close()
    return {**figures, "beside": list(dict.fromkeys([*before, *_other_owners(ledger)]))}


def _other_owners(ledger: Ledger) -> list[str]:
    entries = [entry for entry in ledger.read() if entry.is_of_this_host and entry.holds and not entry.dead]
    return [entry.owner for entry in entries if entry.pid != os.getpid()]
