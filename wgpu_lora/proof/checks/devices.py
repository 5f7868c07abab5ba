"""1. Devices are enumerated, and those that are used compute."""

from __future__ import annotations

from typing import Any

from wgpu_lora.proof.context import Proof
from wgpu_lora.proof.finding import Finding


def devices_compute(proof: Proof) -> Finding:
    """Passes where every device that is used multiplied matrices right, and two are used where there are two."""
    found = proof.devices()
    devices, used = found["devices"], found["used"]
    figures = {
        "devices": devices,
        "discrete": sum(a["kind"] == "discrete" for a in devices),
        "required_discrete": proof.discrete,
        "used": used,
        "computed": found["computed"],
        "wgpu_native": found["wgpu_native"],
    }
    if not devices:
        none = "wgpu found no adapter: no driver is installed, or none that works"
        return Finding.of([none, *filter(None, [proof.lacks_discrete()])], "", figures)
    faults = [
        f"device {index} ({devices[int(index)]['name']}) multiplied matrices wrong, by {result['error']:.1e}"
        for index, result in found["computed"].items()
        if not result["fine"]
    ]
    if len(used) < min(2, found["different"]) and not found["asked"]:
        faults.append(f"only {len(used)} of {found['different']} different devices are used")
    if lacking := proof.lacks_discrete():
        faults.append(lacking)
    unused = len(devices) - len(used)
    left = f"; {unused} left out by --devices" if found["asked"] and unused else ""
    names = ", ".join(_name(devices[index]) for index in used)
    reason = f"{len(devices)} found, {figures['discrete']} discrete; used: {names}{left}"
    return Finding.of(faults, reason, figures)


def _name(adapter: dict[str, Any]) -> str:
    return f"{adapter['index']} {adapter['name']} ({adapter['driver']}, {adapter['backend']}, {adapter['kind']})"
