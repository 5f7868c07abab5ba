"""Tasks that several devices train together: when enough of them are free at the same time."""

from __future__ import annotations

import math

import numpy as np

from wgpu_lora.cluster.placement.field import Field, Numbers
from wgpu_lora.cluster.placement.types import Placement, Waiting


def start_together(field: Field, task: Waiting, need: Numbers, slack: float) -> Placement | None:
    """Start a task on `task.devices` devices, or keep devices for it.

    Devices take shares by their speed, so the task's speed is their sum. It starts now if it ends at most `slack`
    times later than if it waited for faster devices.

    Returns:
        The placement, or None if the task waits: the devices where it ends first are then kept for it.
    """
    # Devices that are kept for another such task are idle, but free only when they have run it.
    now = field.open & (need <= field.free) & np.isinf(field.gap)
    begins = np.where(now, 0.0, np.where((need <= field.room) & np.isfinite(need), field.ready, math.inf))
    best = _earliest(field, task, begins)
    if best is None:
        return None
    end, start, chosen = best
    if now.sum() >= task.devices:
        scores = field.scores(task, need)
        by_score = np.argsort(np.where(now, -scores, math.inf), kind="stable")
        by_speed = np.argsort(np.where(now, -field.rate, math.inf), kind="stable")
        for order in (by_score, by_speed):
            devices = [int(at) for at in order[: task.devices]]
            if _seconds(task, field.rate[devices]) <= slack * end:
                return _start(field, task, devices, need, scores)
    for at in chosen:
        if now[at]:
            field.keep(at, start)
        field.ready[at] = end
        field.refresh(at)
    return None


def _earliest(field: Field, task: Waiting, begins: Numbers) -> tuple[float, float, list[int]] | None:
    """The end, the start and the devices with which the task ends first."""
    order = [int(at) for at in np.argsort(begins, kind="stable") if math.isfinite(begins[at])]
    share = field.speed / field.slots
    best: tuple[float, float, list[int]] | None = None
    for count in range(task.devices, len(order) + 1):
        start = float(begins[order[count - 1]])
        chosen = sorted(order[:count], key=lambda at: (-share[at], at))[: task.devices]
        end = start + _seconds(task, share[chosen])
        if best is None or end < best[0]:
            best = end, start, chosen
    return best


def _seconds(task: Waiting, rates: Numbers) -> float:
    return task.seconds if task.seconds is not None else task.work / float(rates.sum())


def _start(field: Field, task: Waiting, devices: list[int], need: Numbers, scores: Numbers) -> Placement:
    """The fastest device leads."""
    devices = sorted(devices, key=lambda at: (-field.speed[at], at))
    seconds = _seconds(task, field.rate[devices])
    for at in devices:
        field.begin(at, float(need[at]), seconds)
    names = tuple(field.places[at].id for at in devices)
    return Placement(task.members, names, float(scores[devices].mean()), int(need[devices].max()))
