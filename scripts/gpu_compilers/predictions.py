"""What compilers made of the default tilings, in a small file, to be put beside measurements of a GPU of the same kind.

`make gpu-compilers GPUS='--default-only --predictions scripts/gpu_compilers/predictions.json'` writes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.gpu_compilers.run import Answers
from wgpu_lora.atomic import write_bytes_atomic
from wgpu_lora.bench.brick_results import commit
from wgpu_lora.gpu.device import Device

SCHEMA = "wgpu-lora-predictions/1"
FILE = Path(__file__).with_name("predictions.json")
FIGURES = ("registers", "spilled", "occupancy", "instructions")
AMD, NVIDIA = 0x1002, 0x10DE
GENERATIONS = {  # parts of the names that drivers give AMD's GPUs; RDNA2's units are those of RDNA1
    "rdna4": ("RX 9", "AI PRO R9", "GFX12", "NAVI4"),
    "rdna3": ("RX 7", "PRO W7", "GFX11", "NAVI3", "780M", "760M", "890M", "880M", "8060S", "8050S"),
    "rdna1": ("RX 5", "RX 6", "PRO W5", "PRO W6", "GFX10", "NAVI1", "NAVI2", "680M", "660M"),
}
Predicted = dict[str, Any]


def key(call: Mapping[str, Any]) -> str:
    """A compute pipeline (`recorded.Call.to_json`), as its kernel and a digest of all that is compiled into it."""
    compiled = [call[name] for name in ("constants", "bindings", "tiling")]
    digest = hashlib.sha256(json.dumps(compiled, sort_keys=True).encode()).hexdigest()
    return f"{call['kernel']} {digest[:12]}"


def to_json(answers: Sequence[Answers]) -> Predicted:
    """The figures of every default tiling, by pipeline; FIGURES, or null where the compiler gave up."""
    devices = []
    for one in answers:
        rows = {
            key(row.call): row.compiled and [getattr(row.compiled, name) for name in FIGURES]
            for row in one.rows
            if row.call["default"]
        }
        devices.append({**one.to_json(), "title": one.gpu.title, "kernels": rows})
    return {"schema": SCHEMA, "commit": commit(), "figures": FIGURES, "devices": devices}


def nearest(device: Device, predicted: Predicted) -> Predicted | None:
    """The predictions for the GPU and subgroup size most like a device; None for a device of another vendor."""
    gpu = kind_of(device.info.vendor_id, device.info.name)
    found = [one for one in predicted["devices"] if one["gpu"] == gpu]
    size = device.capabilities.subgroup_size
    return min(found, key=lambda one: abs(one["subgroup_size"] - size), default=None)


def kind_of(vendor: int, name: str) -> str | None:
    """The GPU of `devices.GPUS` that a device is most like: of AMD's RDNA3, unless its name tells the generation."""
    if vendor == AMD:
        parts = ((gpu, part) for gpu, parts in GENERATIONS.items() for part in parts)
        return next((gpu for gpu, part in parts if part in name.upper()), "rdna3")
    return "ada" if vendor == NVIDIA else "m1" if "Apple" in name else None


def figures(one: Predicted | None, calls: Iterable[Mapping[str, Any]]) -> list[Predicted | None]:
    """The prediction for each pipeline by name; None if it was not compiled."""
    known = one["kernels"] if one else {}
    values = (known.get(key(call)) for call in calls)
    return [value and dict(zip(FIGURES, value, strict=True)) for value in values]


def read(file: Path = FILE) -> Predicted:
    """The file's content, or no devices if it is missing."""
    return json.loads(file.read_text()) if file.is_file() else {"devices": []}


def write(file: Path, predicted: Predicted) -> None:
    """A line for each device, so that changes can be read."""
    rest = {name: value for name, value in predicted.items() if name != "devices"}
    devices = ",\n".join(json.dumps(one) for one in predicted["devices"])
    write_bytes_atomic(file, f'{json.dumps(rest)[:-1]}, "devices": [\n{devices}\n]}}\n'.encode())
