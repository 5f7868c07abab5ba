"""What fits nowhere is refused at once, rather than left waiting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from wgpu_lora.cluster.placement.types import Place
from wgpu_lora.train.memory import format_bytes, format_bytes_exact


def refusal(task: str, needed: Mapping[str, int], places: Sequence[Place], devices: int = 1) -> str | None:
    """Why a task can never run on these devices, in a sentence; None if it can, now or once they are idle.

    Args:
        task: its name. needed: bytes by plan class; without those of devices that cannot run it at all.
        places: all devices of the cluster, those that are `out`, too.
        devices: how many it trains on together.
    """
    able = [place for place in places if place.plan_class in needed]
    fitting = [place for place in able if needed[place.plan_class] <= _most(place)]
    usable = [place for place in fitting if not place.out]
    if len(usable) >= devices:
        return None
    if not places:
        return f"Adapter '{task}' cannot run: the cluster has no device."
    if not able:
        return f"Adapter '{task}' cannot run on any of the cluster's devices."
    if devices > 1 and usable:
        return f"Adapter '{task}' needs {devices} devices that have the memory, but there are {len(usable)}."
    if fitting:
        out = max(fitting, key=lambda place: (_most(place), place.id))
        return f"Adapter '{task}' fits only on devices that are out of use, such as {_named(out)}, which is {out.out}."
    nearest = max(able, key=lambda place: (_most(place) / needed[place.plan_class], place.id))
    return (
        f"Adapter '{task}' needs {format_bytes_exact(needed[nearest.plan_class])} of device memory, but the nearest "
        "device, "
        f"{_named(nearest)}, has {format_bytes(int(_most(nearest)))}."
    )


def _most(place: Place) -> float:
    """Bytes that a job could ever get on a device."""
    return math.inf if place.budget is None else place.budget


def _named(place: Place) -> str:
    return place.name or place.id
