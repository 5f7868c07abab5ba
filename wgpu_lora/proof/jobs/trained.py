"""A run that has been trained, opened again: its own programs, on its device, in the tilings that it chose."""

from __future__ import annotations

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
# A direction's length over its matrix's. Each is compared with its half and its quarter: where the loss bends too much
# between them, the next is taken. Which one that is depends on the measured losses alone, never on the gradient.
LENGTHS = tuple(0.1 / 2**i for i in range(8))
BENT = 0.05  # by how much two may differ; their extrapolation is then good to some thousandths
ROUNDING = 2e-6  # of the loss: what f32 may leave of a difference; 4e-7 was measured
UNTRAINED = 0.01  # stands for the size of a value where a matrix is all zeros
Steps = list[tuple[Batch, list[Group]]]


@contextmanager
def reopened(directory: str, device: int) -> Iterator[tuple[Session, AdapterRun, Steps, int]]:
    """The run in a directory, to which nothing is written: its session, allocated, with no adapter placed yet; the
    batches of its first step, which the options alone decide (train.stream); and what that step's loss is a mean over.
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
    """Device and host seconds of the run's first step, medians, and the step's loss, which the run's log has too."""
    with reopened(directory, device) as (session, run, steps, units):
        run.place_initial(session)
        timer = Timer(session.device)
        device_seconds, host_seconds = [], []
        for repeat in range(-2, REPEATS):  # the first run compiles, the second finds where a long step is to be split
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
    """The recorded gradients of the run's program next to central differences of its loss.

    For a random direction v of a matrix W: L(W + v) - L(W - v), measured and extrapolated to what is linear in v, and
    as the gradient has it. `measured` is None if the loss bends at every length. L is the loss at W.
    """
    adapter = read_adapter(directory)[1]
    with reopened(directory, device) as (session, run, ((batch, groups), *_), _):
        batch.upload(groups)

        def loss(matrices: Matrices) -> float:
            """Of the first batch, with these matrices in place; the others stay as they were."""
            session.adapters.write(session.device, 0, matrices)
            session.begin()
            batch.program.run()
            return session.totals.read_loss(session.device, 0) * groups[0].weight

        centre = loss(adapter)
        recorded = session.adapters.read(session.device, 0, session.adapters.grads)  # of this one run: they add up
        rng = np.random.default_rng(run.args.seed)

        def direction_of(module: str, which: str, gradient: np.ndarray) -> dict[str, Any]:
            pair = dict(zip("AB", adapter[module], strict=True))
            matrix = pair[which].astype(np.float64)
            direction = rng.standard_normal(matrix.shape)
            size = np.linalg.norm(matrix) or UNTRAINED * np.sqrt(matrix.size)
            direction *= size / np.linalg.norm(direction)

            def moved(by: float) -> float:
                found = pair | {which: (matrix + by * direction).astype(np.float32)}
                return loss({module: (found["A"], found["B"])})

            slope = 2 * float((gradient.astype(np.float64) * direction).sum())
            found = difference(moved, slope, centre)
            session.adapters.write(session.device, 0, {module: adapter[module]})
            return {"matrix": f"{module}.{which}", **found}

        modules = chosen(list(session.adapters.modules(0)))
        pairs = [(name, which, g) for name in modules for which, g in zip("AB", recorded[name], strict=True)]
        return {"loss": centre, "rounding": ROUNDING, "directions": [direction_of(*pair) for pair in pairs]}


def chosen(modules: Sequence[str]) -> list[str]:
    """One module of each name, from first layer to last."""
    by_name: dict[str, list[str]] = {}
    for module in modules:
        by_name.setdefault(module.rpartition(".")[2], []).append(module)
    shares = np.linspace(0, 1, len(by_name))
    return [of[round(share * (len(of) - 1))] for share, of in zip(shares, by_name.values(), strict=True)]


def difference(loss: Callable[[float], float], slope: float, centre: float) -> dict[str, Any]:
    """A central difference, and what the slope makes of it, at the first length where the loss does not bend.

    loss: of a matrix moved by this share of a direction. centre: the loss of the matrix itself.
    """
    at: list[float] = []
    for length in LENGTHS:
        at.append(loss(length) - loss(-length))
        if len(at) >= 3 and straight(at[-3], at[-2], centre) and straight(at[-2], at[-1], centre):
            # Richardson: the cubic term is eight times as large in the whole as in the half.
            measured = (8 * at[-2] - at[-3]) / 3
            return {"length": 4 * length, "measured": measured, "gradient": slope * 4 * length}
    return {"length": None, "measured": None, "gradient": slope}


def straight(whole: float, half: float, centre: float) -> bool:
    """Whether the loss moves half as much over half the length, nearly, or as nearly as f32 can tell."""
    return abs(2 * half - whole) <= BENT * abs(whole) + 2 * ROUNDING * abs(centre)
