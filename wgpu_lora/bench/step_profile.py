"""Profile of a training step: the time of every dispatch, and of the whole step."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wgpu_lora.bench.training_step import WARMUP, TrainingStep
from wgpu_lora.files.atomic import replace_file
from wgpu_lora.gpu.dispatch import Dispatch
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.timer import Timer
from wgpu_lora.names.text import count_noun
from wgpu_lora.ops.matmul.matrix_stack import sizes
from wgpu_lora.train.run.records import RunRecord

SCHEMA = "wgpu-lora-profile/1"
MICROSECONDS = 1e6


@dataclass(frozen=True)
class Piece:
    """A dispatch. seconds: mean over the rounds. operations: of a matrix product, else None."""

    program: str
    kernel: str
    shape: str
    groups: tuple[int, int, int]
    seconds: float
    operations: int | None


@dataclass(frozen=True)
class KernelTotal:
    """The dispatches of a kernel, or of a kernel at one shape. share: of the time of all kernels."""

    kernel: str
    shape: str | None
    calls: int
    seconds: float
    share: float
    gflops: float | None


@dataclass(frozen=True)
class Profile:
    """The time of a step, measured in three ways in each round; all values are means over the rounds.

    The three measurements vary, so the time of a part may exceed that of the whole. A share that they do not determine
    is None.

    Attributes:
        step_seconds: a whole step of training: upload, dispatches and readback. step_spread: standard deviation over
            the rounds, 0 for one round.
        device_seconds: the compute passes of a step, by the clock of the device or the host (`clock`).
        pieces: every dispatch in a compute pass of its own, which may take a little longer than among others.
        trained, tokens: tokens of the step with a loss, and all tokens.
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
        """The share of the kernels in the step's time; None if the kernels alone took longer than the step."""
        share = self.attributed_seconds / self.step_seconds
        return share if share <= 1 else None

    @property
    def host_share(self) -> float | None:
        """The share of the step's time in which the device was idle; None if it is less than the variation of the
        steps, or if the clock is the host's, which includes waiting."""
        idle = self.step_seconds - self.device_seconds
        return None if self.clock == "host" or idle < self.step_spread or idle < 0 else idle / self.step_seconds

    def groups(self, by_shape: bool = False) -> list[KernelTotal]:
        """The dispatches by kernel, the slowest first."""
        result: dict[tuple[str, str | None], list[Piece]] = defaultdict(list)
        for piece in self.pieces:
            result[piece.kernel, piece.shape if by_shape else None].append(piece)
        rows = []
        for (kernel, shape), pieces in result.items():
            seconds = sum(piece.seconds for piece in pieces)
            counts = [piece.operations for piece in pieces if piece.operations is not None]
            gflops = sum(counts) / seconds / 1e9 if len(counts) == len(pieces) and seconds else None
            share = seconds / self.attributed_seconds if seconds else 0.0
            rows.append(KernelTotal(kernel, shape, len(pieces), seconds, share, gflops))
        return sorted(rows, key=lambda group: -group.seconds)

    def as_dict(self, by_shape: bool = False) -> dict[str, Any]:
        names = ("clock", "rounds", "step_seconds", "step_spread", "device_seconds", "attributed_seconds")
        return {
            **{name: getattr(self, name) for name in (*names, "attributed_share", "host_share")},
            "tokens_per_second": self.trained / self.step_seconds,
            "processed_tokens_per_second": self.tokens / self.step_seconds,
            "kernels": [asdict(group) for group in self.groups(by_shape)],
        }


def trained_sizes(record: RunRecord) -> tuple[int, int]:
    """Rows per batch of a finished run, and tokens per row: the maximum if rows were packed, else the average."""
    args, state = record.options, record.state
    packed, rows, batches = args.batching
    if packed or not state.step:
        return rows, args.length
    return rows, max(2, math.ceil(state.processed_tokens / (state.step * batches * rows)))


def described(work: Mapping[str, Any]) -> str:
    """A profile's `work` as a line of text."""
    layers = count_noun(work["layers"], "layer")
    if not work["whole"]:
        layers = f"its first {'layer' if work['layers'] == 1 else layers} only"
    checkpointing = ", gradient checkpointing" if work["gradient_checkpointing"] else ""
    batch, on = f"{work['batch']} x {work['tokens']} tokens", work["target_modules"]
    return f"{work['model']}, {layers} in {work['base_dtype']}, {batch}, rank {work['rank']} on {on}{checkpointing}"


def profile_step(step: TrainingStep, rounds: int = 5, on_round: Callable[[], None] = lambda: None) -> Profile:
    """Profile a step whose buffers are allocated.

    A round is a step as in training, then its programs with the timer, each as a whole and dispatch by dispatch.
    """
    step.seconds(WARMUP)
    programs = step.session.programs()
    timer = Timer(step.session.device)
    try:
        steps, device, dispatch_seconds = [], [], []
        for _ in range(rounds):
            steps += step.seconds(1)
            device.append(sum(map(timer.run, programs)))
            dispatch_seconds.append([seconds for program in programs for seconds in timer.dispatch_seconds(program)])
            on_round()
    finally:
        timer.free()
    dispatches = [(program, dispatch) for program in programs for dispatch in program.dispatches]
    means = map(statistics.fmean, zip(*dispatch_seconds, strict=True))
    return Profile(
        clock=timer.clock,
        rounds=rounds,
        step_seconds=statistics.fmean(steps),
        device_seconds=statistics.fmean(device),
        pieces=[_piece(*of, seconds) for of, seconds in zip(dispatches, means, strict=True)],
        step_spread=statistics.stdev(steps) if rounds > 1 else 0.0,
        trained=step.trained,
        tokens=step.tokens,
    )


def _piece(program: Program, dispatch: Dispatch, seconds: float) -> Piece:
    kernel, constants = dispatch.kernel, dispatch.constants
    product = {"m", "n", "k"} <= set(constants)
    operations = 2 * constants["m"] * sum(sizes(constants, "n")) * sum(sizes(constants, "k")) if product else None
    # Sizes, without those that have their default: 'm 512, n 1024, k 1024'.
    shape = ", ".join(
        f"{name} {constants[name]}"
        for name, kind in kernel.constants.items()
        if kind in ("u32", "dim") and constants[name] != kernel.defaults.get(name)
    )
    return Piece(program.name, kernel.name, shape, dispatch.groups, seconds, operations)


def write_trace(path: Path, profile: Profile, process: str) -> None:
    """Write the dispatches end to end as a Chrome trace, for Perfetto or chrome://tracing; times in microseconds."""
    threads = list(dict.fromkeys(piece.program for piece in profile.pieces))
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": process}}]
    for number, name in enumerate(threads, 1):
        events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": name}})
    at = 0.0
    for piece in profile.pieces:
        duration = MICROSECONDS * piece.seconds
        arguments = {"shape": piece.shape, "workgroups": list(piece.groups), "operations": piece.operations}
        position = {"pid": 1, "tid": threads.index(piece.program) + 1, "ts": at, "dur": duration}
        events.append({"name": piece.kernel, "cat": "kernel", "ph": "X", **position, "args": arguments})
        at += duration
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"clock": profile.clock}}
    replace_file(path, (json.dumps(trace) + "\n").encode(), "--trace")
