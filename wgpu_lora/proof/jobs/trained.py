"""A finished run, opened again: its own programs, on its device, with the tilings that it chose."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from wgpu_lora.formats.peft import Matrices, read_adapter
from wgpu_lora.gpu.timer import Timer
from wgpu_lora.train.batch import Batch
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.objectives.base import Group
from wgpu_lora.train.records import RunRecord
from wgpu_lora.train.session import Session
from wgpu_lora.train.slot import AdapterRun
from wgpu_lora.worker.child import Port

REPEATS = 3  # of the timed step
# A direction's length over its matrix's. Each is compared with its half and its quarter; if the loss is too curved
# between them, the next is taken. Which one that is depends only on the measured losses, never on the gradient.
LENGTHS = tuple(0.1 / 2**i for i in range(8))
BENT = 0.05  # by how much two may differ; their extrapolation is then accurate to some thousandths
ROUNDING = 2e-6  # of the loss: error of a difference in f32; 4e-7 was measured
UNTRAINED = 0.01  # size of a value, for a matrix that is all zeros
Steps = list[tuple[Batch, list[Group]]]


@contextmanager
def reopened(directory: str, device: int) -> Iterator[tuple[Session, AdapterRun, Steps, int]]:
    """Opens the run in a directory without writing to it.

    Yields its session, allocated, but without an adapter; its slot; the batches of its first step, which depend on the
    options only (train.stream); and the number of units that this step's loss is a mean over.
    """
    record = RunRecord.read(Path(directory))
    job = prepare_job(replace(record.options, device=str(device), resume=False), planning=True)
    session, stream = job.session, job.run.stream
    try:
        session.allocate(choices=record.state.tiles)
        step = next(stream.steps())
        steps = [(session.batch_for(groups), groups) for groups in stream.groups(step)]
        yield session, job.run, steps, stream.units(step.samples)
    finally:
        session.close()


def clock(port: Port, *, directory: str, device: int) -> dict[str, Any]:
    """Median device and host seconds of the run's first step, and its loss, which is in the run's log too."""
    with reopened(directory, device) as (session, run, steps, units):
        run.place_initial(session)
        timer = Timer(session.device)
        device_seconds, host_seconds = [], []
        for repeat in range(-2, REPEATS):  # the first run compiles, the second finds where to split a long step
            session.begin()
            begin, spent = time.perf_counter(), 0.0
            for batch, groups in steps:
                batch.upload(groups)
                if repeat < 0:
                    batch.program.run()
                else:
                    spent += timer.run(batch.program)
            device_seconds.append(spent)
            host_seconds.append(time.perf_counter() - begin)
        timer.free()
        return {
            "clock": timer.clock,
            "dispatches": sum(len(batch.program.dispatches) for batch, _ in steps),
            "device_seconds": statistics.median(device_seconds[-REPEATS:]),
            "host_seconds": statistics.median(host_seconds[-REPEATS:]),
            "loss": session.totals.read_loss(session.device, 0) / units,
        }


def gradients(port: Port, *, directory: str, device: int) -> dict[str, Any]:
    """The recorded gradients of the run's program next to central differences of its loss L.

    For a random direction v of a matrix W: L(W + v) - L(W - v), measured and extrapolated to its linear part, and as
    the gradient predicts it; see `difference`.
    """
    adapter = read_adapter(directory)[1]
    with reopened(directory, device) as (session, run, ((batch, groups), *_), _):
        batch.upload(groups)

        def loss(matrices: Matrices) -> float:
            """The loss of the first batch with these matrices; all others stay unchanged."""
            session.adapters.write(session.device, 0, matrices)
            session.begin()
            batch.program.run()
            return session.totals.read_loss(session.device, 0) * groups[0].weight

        centre = loss(adapter)
        recorded = session.adapters.read(session.device, 0, session.adapters.grads)  # before other runs add to them
        rng = np.random.default_rng(run.args.seed)

        def direction_of(module: str, which: int) -> dict[str, Any]:
            matrix, gradient = (of[module][which].astype(np.float64) for of in (adapter, recorded))
            direction = rng.standard_normal(matrix.shape)
            size = np.linalg.norm(matrix) or UNTRAINED * np.sqrt(matrix.size)
            direction *= size / np.linalg.norm(direction)

            def moved(by: float) -> float:
                a, b = adapter[module]
                changed = (matrix + by * direction).astype(np.float32)
                return loss({module: (a, changed) if which else (changed, b)})

            found = difference(moved, 2 * float((gradient * direction).sum()), centre)
            session.adapters.write(session.device, 0, {module: adapter[module]})
            return {"matrix": f"{module}.{'AB'[which]}", **found}

        modules = chosen(list(session.adapters.modules(0)))
        directions = [direction_of(module, which) for module in modules for which in (0, 1)]
        return {"loss": centre, "rounding": ROUNDING, "directions": directions}


def chosen(modules: Sequence[str]) -> list[str]:
    """One module of each name, from first layer to last."""
    by_name: dict[str, list[str]] = {}
    for module in modules:
        by_name.setdefault(module.rpartition(".")[2], []).append(module)
    shares = np.linspace(0, 1, len(by_name))
    return [of[round(share * (len(of) - 1))] for share, of in zip(shares, by_name.values(), strict=True)]


def difference(loss: Callable[[float], float], slope: float, centre: float) -> dict[str, Any]:
    """A central difference, and what the slope predicts for it, at the first length where the loss is straight.

    loss: of a matrix moved by this share of a direction. centre: the loss of the matrix itself.
    `length` is None if the loss is too curved at every length. A loss that is not finite is a measurement as well.
    """
    at: list[float] = []
    for length in LENGTHS:
        at.append(loss(length) - loss(-length))
        if not math.isfinite(at[-1]):
            return {"length": length, "measured": at[-1], "gradient": slope * length}
        if len(at) >= 3 and straight(at[-3], at[-2], centre) and straight(at[-2], at[-1], centre):
            # Richardson extrapolation: the cubic term is eight times as large in the whole as in the half.
            measured = (8 * at[-2] - at[-3]) / 3
            return {"length": 4 * length, "measured": measured, "gradient": slope * 4 * length}
    return {"length": None, "measured": None, "gradient": slope}


def straight(whole: float, half: float, centre: float) -> bool:
    """Whether the loss changes about half as much over half the length, as far as f32 can tell."""
    return abs(2 * half - whole) <= BENT * abs(whole) + 2 * ROUNDING * abs(centre)
