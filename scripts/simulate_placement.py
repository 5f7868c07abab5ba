"""Many adapters on many devices in virtual time, placed as clusters place them.

    python -m scripts.simulate_placement [--adapters 10000] [--devices 1000] [--crashes 2] [--seed 0] [--first]

Devices are of four kinds, 1, 2, 4 and 8 times as fast as the slowest. Adapters have 1 to 20 minutes of work on the
slowest kind, and a fifth of them fit on half of the devices only. Crashes cost the steps since the last checkpoint, of
which there is one a minute. Prints the makespan, the least possible one, and the processor time of decisions here; with
--first, that of the first decision only, since all decisions of 10,000 adapters take hours.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import time
from dataclasses import dataclass, field

from wgpu_lora.cluster.placement.placement import place
from wgpu_lora.cluster.placement.placement_field import CandidateDevice, PendingTask

KINDS = (1000.0, 2000.0, 4000.0, 8000.0)  # tokens/s
JOINED = 1.2  # tokens/s of a pipeline over its adapters one after another
SMALL, LARGE = 4 << 30, 12 << 30  # bytes: adapters need the one or the other
BUDGETS = (8 << 30, 24 << 30)
CHECKPOINT = 60.0  # seconds of work that a crash costs at most
DAY = 86400.0


@dataclass
class Device:
    id: str
    speed: float
    budget: int
    end: float = 0.0  # of what runs on it
    tasks: dict[str, float] = field(default_factory=dict)  # tokens that are left, by task
    start: float = 0.0
    peak_bytes: int = 0


def simulate(adapters: int, devices: int, crashes: float, seed: int, first: bool = False) -> dict[str, float]:
    """The makespan in seconds, its bound, and the seconds of decisions. crashes: per device and day."""
    draw = random.Random(seed)
    machines = {
        name: Device(name, KINDS[n % 4], BUDGETS[n // 4 % 2]) for n in range(devices) for name in [f"device-{n:05}"]
    }
    work = {f"task-{n:06}": draw.uniform(60, 1200) * KINDS[0] for n in range(adapters)}
    needs = {name: LARGE if draw.random() < 0.2 else SMALL for name in work}
    bound = max(
        sum(work.values()) / (JOINED * sum(machine.speed for machine in machines.values())),
        max(work.values()) / KINDS[-1] / JOINED,
    )
    queue, units = set(work), dict[str, tuple[str, ...]]()
    now, decisions, moves, events = 0.0, list[float](), 0, list[tuple[float, str, bool]]()
    while queue or any(machine.tasks for machine in machines.values()):
        begin = time.process_time()
        placements = place(
            [_waiting_task(name, work, needs, units) for name in sorted(queue)],
            [_candidate(machine, now) for machine in machines.values()],
            now,
        )
        decisions.append(time.process_time() - begin)
        if first:
            return {"decision_first_seconds": decisions[0], "placements": len(placements)}
        for placement in placements:
            device = machines[placement.devices[0]]
            gain = JOINED if len(placement.tasks) > 1 else 1.0
            device.tasks = {name: work[name] for name in placement.tasks}
            device.start, device.peak_bytes = now, placement.peak_bytes
            device.end = now + sum(device.tasks.values()) / (device.speed * gain)
            crash = now + draw.expovariate(crashes / DAY) if crashes else float("inf")
            heapq.heappush(events, (min(device.end, crash), device.id, crash < device.end))
            units.update(dict.fromkeys(placement.tasks, placement.tasks) if len(placement.tasks) > 1 else {})
            queue.difference_update(placement.tasks)
        now, name, crashed = heapq.heappop(events)
        device = machines[name]
        if crashed:
            moves += 1
            checkpoint_share = max(0.0, (now - device.start) // CHECKPOINT * CHECKPOINT) / (device.end - device.start)
            for task, tokens in device.tasks.items():
                work[task] = tokens * (1 - checkpoint_share)
            queue.update(device.tasks)
        device.tasks, device.end, device.peak_bytes = {}, now, 0
    return {
        "makespan_seconds": now,
        "bound_seconds": bound,
        "ratio": now / bound,
        "moves": moves,
        "decisions": len(decisions),
        "decision_first_seconds": decisions[0],
        "decision_median_seconds": statistics.median(decisions),
        "decision_longest_seconds": max(decisions),
    }


def _waiting_task(
    name: str, work: dict[str, float], needs: dict[str, int], units: dict[str, tuple[str, ...]]
) -> PendingTask:
    return PendingTask(name, {"class": needs[name]}, base="base", base_bytes=3 << 30, work=work[name], run="run",
                   join="never" if name in units else "auto")  # fmt: skip


def _candidate(device: Device, now: float) -> CandidateDevice:
    return CandidateDevice(device.id, "class", free=device.budget - device.peak_bytes, speed=device.speed,
                 active_bytes=device.peak_bytes, active=int(bool(device.tasks)),
                 busy_seconds=max(device.end - now, 0.0), budget=device.budget, joined_speedup=JOINED)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, default=10_000)
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--crashes", type=float, default=2.0, help="per device and day")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", action="store_true", help="only the first decision")
    args = parser.parse_args()
    print(json.dumps(simulate(args.adapters, args.devices, args.crashes, args.seed, args.first), indent=1))


if __name__ == "__main__":
    main()
