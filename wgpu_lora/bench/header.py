"""What a result file says first: which form it has, and what was measured on what."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from wgpu_lora.bench.results import commit
from wgpu_lora.gpu.device import Device
from wgpu_lora.train.output import environment


def header(schema: str, device: Device, **more: Any) -> dict[str, Any]:
    """The first line of a file of JSON lines: schema, device, driver, versions and commit."""
    return {"schema": schema, "kind": "header", **more, "commit": commit(), **asdict(environment(device))}
