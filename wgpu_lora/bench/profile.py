"""Where a training step's time goes: every dispatch timed by itself, beside the whole step as it is trained."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wgpu_lora.atomic import write_bytes_atomic
from wgpu_lora.bench.step import WARMUP, TrainingStep
from wgpu_lora.gpu.program import Dispatch, Program
from wgpu_lora.gpu.timer import Timer
from wgpu_lora.train.records import RunRecord
from wgpu_lora.words import counted

SCHEMA = "wgpu-lora-profile/1"
MICROSECONDS = 1e6


@dataclass(frozen=True)
class Piece:
    """One dispatch. seconds: the mean of the rounds. operations: of a matrix product, counted; else None."""

    program: str
    kernel: str
    shape: str
    groups: tuple[int, int, int]
    seconds: float
    operations: int | None


@dataclass(frozen=True)
class Group:
    """Dispatches of one kernel, or of one kernel at one shape. share: of the seconds of all kernels."""

    kernel: str
    shape: str | None
    calls: int
    seconds: float
    share: float
    gflops: float | None


@dataclass(frozen=True)
class Profile:
    """A step's time, seen three ways, each a mean over rounds that take turns: means of parts add up.

    They are three measurements, on a machine that is never quite as fast twice, so one need not fit into another: what
    follows from two of them is None where it cannot be told from that.

    Attributes:
        step_seconds: the whole step as it is trained: upload, dispatches, reading back. step_spread: the standard
            deviation between rounds, 0 of one round.
        device_seconds: its compute passes as they are trained, by the device's own clock where `clock` says so.
        pieces: every dispatch in a pass of its own, which may cost a little more than a dispatch among others.
        trained, tokens: tokens of the step that have a loss, and all that are processed.
    """

    clock: str
    rounds: int
    step_seconds: float
    device_seconds: float
    pieces: list[Piece]
    step_spread: float = 0.0
    trained: int = 0
    tokens: int = 0

    @property
    def attributed_seconds(self) -> float:
        return sum(piece.seconds for piece in self.pieces)

    @property
    def attributed_share(self) -> float | None:
        """Of the step's time, what the kernels account for; None where by themselves they take longer than the step."""
        share = self.attributed_seconds / self.step_seconds
        return share if share <= 1 else None

    @property
    def host_share(self) -> float | None:
        """Of the step's time, when the device had nothing to do; None where the host's clock counts waiting as the
        device's, or where it is less than steps vary."""
        idle = self.step_seconds - self.device_seconds
        if self.clock == "host" or idle < self.step_spread or idle < 0:
            return None
        return idle / self.step_seconds

    def groups(self, by_shape: bool = False) -> list[Group]:
        """The dispatches by kernel, the most expensive first."""
        found: dict[tuple[str, str | None], list[Piece]] = defaultdict(list)
        for piece in self.pieces:
            found[piece.kernel, piece.shape if by_shape else None].append(piece)
        made = []
        for (kernel, shape), pieces in found.items():
            seconds, operations = sum(piece.seconds for piece in pieces), [piece.operations for piece in pieces]
            known = [count for count in operations if count is not None]
            gflops = sum(known) / seconds / 1e9 if len(known) == len(pieces) and seconds > 0 else None
            share = seconds / self.attributed_seconds if seconds else 0.0
            made.append(Group(kernel, shape, len(pieces), seconds, share, gflops))
        return sorted(made, key=lambda group: -group.seconds)

    def as_dict(self, by_shape: bool = False) -> dict[str, Any]:
        names = ("clock", "rounds", "step_seconds", "step_spread", "device_seconds", "attributed_seconds")
        return {
            **{name: getattr(self, name) for name in (*names, "attributed_share", "host_share")},
            "tokens_per_second": self.trained / self.step_seconds,
            "processed_tokens_per_second": self.tokens / self.step_seconds,
            "kernels": [asdict(group) for group in self.groups(by_shape)],
        }


def trained_sizes(record: RunRecord) -> tuple[int, int]:
    """Rows of a finished run's batches, and tokens of each of these: as long as they may be where rows were packed to
    that, else as long as they were on average."""
    args, state = record.options, record.state
    packed, rows, batches = args.batching
    if packed or not state.step:
        return rows, args.length
    return rows, max(2, math.ceil(state.processed_tokens / (state.step * batches * rows)))


def described(work: Mapping[str, Any]) -> str:
    """What was profiled, from a profile's `work`, in a line."""
    count = work["layers"]
    layers = counted(count, "layer") if work["whole"] else f"its first {counted(count, 'layer')} alone"
    checkpointing = ", gradient checkpointing" if work["gradient_checkpointing"] else ""
    batch, on = f"{work['batch']} x {work['tokens']} tokens", work["target_modules"]
    return f"{work['model']}, {layers} in {work['base_dtype']}, {batch}, rank {work['rank']} on {on}{checkpointing}"


def profile_step(step: TrainingStep, rounds: int = 5, on_round: Callable[[], None] = lambda: None) -> Profile:
    """Profiles a step whose buffers are allocated.

    Each round takes the step as the trainer does, then its programs under the timer, whole and dispatch by dispatch.
    """
    session = step.session
    step.seconds(0, WARMUP)
    programs = session.programs()
    timer = Timer(session.device)
    try:
        whole, device, each = [], [], []
        for _ in range(rounds):
            whole += step.seconds(1)
            device.append(sum(timer.run(p) for p in programs))
            each.append([seconds for p in programs for seconds in timer.each(p)])
            on_round()
    finally:
        timer.free()
    dispatches = [(p, dispatch) for p in programs for dispatch in p.dispatches]
    pieces = [_piece(p, d, statistics.fmean(s)) for (p, d), s in zip(dispatches, zip(*each, strict=True), strict=True)]
    means, spread = (statistics.fmean(whole), statistics.fmean(device)), statistics.stdev(whole) if rounds > 1 else 0.0
    return Profile(timer.clock, rounds, *means, pieces, spread, step.trained, step.tokens)


def _piece(program: Program, dispatch: Dispatch, seconds: float) -> Piece:
    kernel, constants = dispatch.kernel, dispatch.constants
    operations = 2 * constants["m"] * constants["n"] * constants["k"] if {"m", "n", "k"} <= set(constants) else None
    return Piece(program.name, kernel.name, shape_of(dispatch), dispatch.groups, seconds, operations)


def shape_of(dispatch: Dispatch) -> str:
    """A dispatch's sizes as one reads them: `m 512, n 1024, k 1024`; what is left at its default is left out."""
    kernel = dispatch.kernel
    sizes = {
        name: value
        for name, value in dispatch.constants.items()
        if kernel.constants[name] in ("u32", "dim") and value != kernel.defaults.get(name)
    }
    return ", ".join(f"{name} {value}" for name, value in sizes.items())


def write_trace(path: Path, profile: Profile, process: str) -> None:
    """Writes the dispatches end to end as a Chrome trace, which Perfetto and chrome://tracing open.

    Times are in microseconds: of each dispatch as measured in a pass of its own, begun where the one before ended.
    """
    threads = list(dict.fromkeys(piece.program for piece in profile.pieces))
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": process}}]
    for number, name in enumerate(threads, 1):
        events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": name}})
    at = 0.0
    for piece in profile.pieces:
        duration = MICROSECONDS * piece.seconds
        arguments = {"shape": piece.shape, "workgroups": list(piece.groups), "operations": piece.operations}
        place = {"pid": 1, "tid": threads.index(piece.program) + 1, "ts": at, "dur": duration}
        events.append({"name": piece.kernel, "cat": "kernel", "ph": "X", **place, "args": arguments})
        at += duration
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"clock": profile.clock}}
    write_bytes_atomic(path, (json.dumps(trace) + "\n").encode())
