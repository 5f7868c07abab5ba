"""What is simulated: adapters, devices, and what fails when, drawn from a seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from wgpu_lora.cluster.placement.simulation.measured import Measured
from wgpu_lora.cluster.placement.types import Waiting

DAY = 86400.0
GIB = 2**30
MEMORY = (8, 16, 24, 80)  # GiB of the kinds of devices, the slowest first, and again from the start
BASES = {"0.6B": (0.6, 2.0), "1.7B": (1.3, 4.0), "4B": (2.9, 7.0), "8B": (5.5, 13.0)}  # GiB: weights, usual need
WORK = 2e6  # tokens of the median adapter
ERROR = 0.05  # of a device's own measurement: the spread that the brick allows
SPREAD = 0.6  # standard deviation of the logarithm of adapters' tokens: from a fifth to five times the median


@dataclass(frozen=True)
class Scenario:
    """How much there is, and how often it fails.

    Attributes:
        per_host: devices of a host. crashes, outages: per day, of each device's worker and of each host.
        down: seconds of an outage. loading: seconds from a placement to the first step.
        copies: seconds between copies of checkpoints on another machine.
        join: as in `Waiting`.
    """

    adapters: int = 1000
    devices: int = 64
    per_host: int = 4
    crashes: float = 2.0
    outages: float = 0.5
    down: float = 900.0
    loading: float = 20.0
    copies: float = 300.0
    join: str = "auto"
    seed: int = 0


@dataclass(frozen=True)
class Machine:
    """A device. speed: that of its kind, within the spread of the measurement. said: the same as its own measurement
    says it, which is all that the placement knows. outages: begins and ends."""

    id: str
    host: str
    kind: Measured
    plan_class: str
    memory: int
    speed: float
    said: float
    outages: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Drawn:
    tasks: list[Waiting]
    machines: list[Machine]
    crashes: list[tuple[float, str]] = field(default_factory=list)  # seconds, device


def draw(scenario: Scenario, kinds: Sequence[Measured]) -> Drawn:
    """The same for the same seed."""
    random = Random(scenario.seed)
    horizon = _horizon(scenario, kinds)
    hosts = -(-scenario.devices // scenario.per_host)
    outages = [_outages(scenario, random, horizon) for _ in range(hosts)]
    machines = []
    for number in range(scenario.devices):
        which, host = number % len(kinds), number // scenario.per_host
        kind = kinds[which]
        speed = kind.speed * random.uniform(kind.slowest, kind.fastest)
        machines.append(
            Machine(
                f"host{host:03}/device{number:03}",
                f"host{host:03}",
                kind,
                f"class{which}",
                MEMORY[which % len(MEMORY)] * GIB,
                speed,
                speed * random.uniform(1 - ERROR, 1 + ERROR),
                outages[host],
            )
        )
    most = max(machine.memory for machine in machines)
    tasks = [_task(scenario, random, number, len(kinds), most) for number in range(scenario.adapters)]
    crashes = [(at, machine.id) for machine in machines for at in _times(random, scenario.crashes, horizon)]
    return Drawn(tasks, machines, sorted(crashes))


def _task(scenario: Scenario, random: Random, number: int, classes: int, most: int) -> Waiting:
    bases = [name for name, (_, need) in BASES.items() if need * 1.2 * GIB <= most]
    base = random.choice(bases)
    weights, need = BASES[base]
    needed = int(need * random.uniform(0.8, 1.2) * GIB)
    return Waiting(
        task=f"adapter{number:05}",
        needed={f"class{which}": needed for which in range(classes)},
        base=base,
        base_bytes=int(weights * GIB),
        work=float(round(WORK * math.exp(random.gauss(0.0, SPREAD)))),
        join=scenario.join,
    )


def _horizon(scenario: Scenario, kinds: Sequence[Measured]) -> float:
    """Seconds for which failures are drawn: several times what all should take."""
    usual = sum(kind.speed for kind in kinds) / len(kinds)
    rounds = scenario.adapters / scenario.devices + 10.0
    return 5.0 * rounds * WORK / min(usual, *(kind.speed for kind in kinds)) + DAY


def _times(random: Random, per_day: float, horizon: float) -> list[float]:
    found: list[float] = []
    at = 0.0
    while per_day > 0:
        at += random.expovariate(per_day / DAY)
        if at > horizon:
            break
        found.append(at)
    return found


def _outages(scenario: Scenario, random: Random, horizon: float) -> tuple[tuple[float, float], ...]:
    found: list[tuple[float, float]] = []
    for at in _times(random, scenario.outages, horizon):
        if not found or at > found[-1][1]:
            found.append((at, at + scenario.down))
    return tuple(found)
