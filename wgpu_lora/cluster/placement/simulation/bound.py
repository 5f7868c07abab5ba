"""How soon all could have ended at best."""

from __future__ import annotations

from collections.abc import Sequence

from wgpu_lora.cluster.placement.simulation.scenario import Machine
from wgpu_lora.cluster.placement.types import Waiting


def lower_bound(tasks: Sequence[Waiting], machines: Sequence[Machine], join: str) -> float:
    """Seconds before which no placement, even one that knows the future, can have ended all tasks.

    The largest of these:

    - for each amount of memory m: the time by which all devices with at least m could have processed the tokens of all
      tasks that need at least m, if they did nothing else and were never idle, outside the outages of their hosts. Each
      at its real speed, times its measured speed-up of pipelines if tasks may be joined and that is more than 1;
    - the longest task on the fastest device that it fits, as if that were never down.

    Not in it, so that what the placement loses by these counts against it: loading, steps that are lost and taken again
    after failures, the time of a task that cannot be divided, and tasks that are too large for some devices' pipelines.
    """
    gains = {m.id: max(m.kind.joined_speedup, 1.0) if join != "never" else 1.0 for m in machines}
    best = 0.0
    for least in sorted({max(task.needed.values()) for task in tasks if task.needed}):
        able = [machine for machine in machines if machine.memory >= least]
        work = sum(task.work for task in tasks if max(task.needed.values()) >= least)
        best = max(best, _seconds(work, [(m.speed * gains[m.id], m.outages) for m in able]))
    for task in tasks:
        able = [machine for machine in machines if machine.memory >= task.needed.get(machine.plan_class, 2**63)]
        best = max(best, min(task.work / machine.speed for machine in able))
    return best


def _seconds(work: float, rates: Sequence[tuple[float, tuple[tuple[float, float], ...]]]) -> float:
    """When devices of these tokens/s, without their outages, have processed `work` tokens."""
    changes = sorted(
        change for rate, outages in rates for begin, end in outages for change in ((begin, -rate), (end, rate))
    )
    rate, now = sum(rate for rate, _ in rates), 0.0
    for at, change in changes:
        if rate > 0 and work <= rate * (at - now):
            break
        work -= rate * (at - now)
        rate, now = rate + change, at
    return now + work / rate
