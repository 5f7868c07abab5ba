"""The time of a training step that the port model predicts, by kernel: nothing runs.

A dispatch takes as long as its multiply-adds at the bound of its inner loop, or as its bytes at the bandwidth of the
memory, whichever is longer. A step is the sum of its dispatches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill

from scripts.gpu_compilers.compiler_run import Answers, Row
from scripts.gpu_compilers.gpus import Gpu
from scripts.gpu_compilers.port_model import bound
from scripts.gpu_compilers.recorded_kernels import Selection, Work
from wgpu_lora.errors import UserError

MEMORY = "memory"
SMALL = 0.005  # of both steps, below which kernels share a line
WIDTH = 132
UNKNOWN = (
    "A prediction, not a measurement: it knows no launches, latencies, occupancy, bank conflicts or clocks under load, "
    "reads each operand from memory once, whatever the caches hold, and skips what masks hide in attention's tiles."
)


@dataclass(frozen=True)
class Piece:
    """Equal dispatches of a step. multiply_adds, nbytes, seconds: of all of them. port: the busiest, or MEMORY.

    bound: of the inner loop, as a share of the peak; 0 if memory is the limit.
    """

    kernel: str
    count: int
    multiply_adds: int
    nbytes: int
    seconds: float
    port: str
    bound: float


def piece(gpu: Gpu, row: Row, work: Work, count: int) -> Piece:
    """Dispatches in a row's tiling. Raises UserError if their work or the bound of their loop is not known."""
    kernel, threads, loop = row.call["kernel"], row.tiling.lanes, row.compiled and row.compiled.loop
    memory, computing = work.nbytes / gpu.bandwidth, 0.0
    limit = bound(loop, gpu.rates, threads, minimum=1) if loop and work.multiply_adds else None
    if (work.multiply_adds and not limit) or (row.bound and not work.multiply_adds):
        raise UserError(f"The time of {kernel} cannot be predicted on {gpu.title}: choose another shape or GPU.")
    if limit and loop:
        units = min(gpu.units, work.threads / min(threads, loop.lanes))
        computing = work.issued / (32 * limit.speed * units * gpu.hertz)
    port, share = (limit.port, limit.share) if limit and computing > memory else (MEMORY, 0.0)
    seconds = count * max(memory, computing)
    return Piece(kernel, count, count * work.multiply_adds, count * work.nbytes, seconds, port, share)


def pieces(answers: Answers, fastest: bool) -> list[Piece]:
    """All dispatches of a step, in the tilings that are the fastest by this model, or in the default ones."""
    candidates = defaultdict[int, list[Piece]](list)
    for row in answers.rows:
        for values, count in row.call["work"]:
            work = Work(**values)
            if work.default or (fastest and not row.spills):
                candidates[work.number].append(piece(answers.gpu, row, work, count))
    return [min(group, key=lambda item: item.seconds) for group in candidates.values()]


def by_kernel(parts: Iterable[Piece]) -> dict[str, list[Piece]]:
    kernels = defaultdict[str, list[Piece]](list)
    for part in parts:
        kernels[part.kernel].append(part)
    return kernels


def seconds(parts: Iterable[Piece]) -> float:
    return sum(part.seconds for part in parts)


def limits(parts: Sequence[Piece]) -> str:
    """The limit of the dispatches that take the most time together: 0.84 VALU."""
    by_limit = defaultdict[str, float](float)
    for part in parts:
        by_limit[part.port if part.port == MEMORY else f"{part.bound:.2f} {part.port}"] += part.seconds
    return max(by_limit, key=lambda limit: by_limit[limit], default="")


def table(before: Sequence[Piece], after: Sequence[Piece]) -> str:
    """Lines of Markdown: a row for each kernel of two steps, by its time in the second."""
    sides = [by_kernel(before), by_kernel(after)]
    totals = [seconds(before), seconds(after)]
    lines = [
        "| kernel | dispatches | TFLOP | GB | f32: ms | bound | f16: ms | bound | of the f16 step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]

    def line(name: str, parts: list[list[Piece]], limit: Callable[[list[Piece]], str] = limits) -> None:
        last = parts[1] or parts[0]
        amounts = (
            str(sum(item.count for item in last)),
            f"{2e-12 * sum(item.multiply_adds for item in last):.2f}",
            f"{1e-9 * sum(item.nbytes for item in last):.1f}",
        )
        times = [cell for part in parts for cell in (f"{1e3 * seconds(part):,.1f}", limit(part))]
        lines.append("| " + " | ".join([name, *amounts, *times, f"{seconds(parts[1]) / totals[1]:.1%}"]) + " |")

    small: list[list[Piece]] = [[], []]
    names = sorted({**sides[1], **sides[0]}, key=lambda name: -seconds(sides[1].get(name, [])))
    for name in names:
        parts = [side.get(name, []) for side in sides]
        if any(seconds(part) >= SMALL * total for part, total in zip(parts, totals, strict=True)):
            line(f"`{name}`", parts)
        else:
            small = [[*previous, *part] for previous, part in zip(small, parts, strict=True)]
    line("others", small)
    line("**step**", [[*before], [*after]], lambda _: "")
    return "\n".join(lines)


def report(answers: Mapping[str, Sequence[Answers]], selection: Selection, command: str) -> str:
    """Markdown: for each GPU, the table and the ratio of the steps in f32 and f16."""
    tokens = selection.batch * selection.tokens
    head = f"`python -m scripts.gpu_compilers {command}`: {selection.shapes[0]}, {selection.batch} x "
    head += f"{selection.tokens} tokens, rank {selection.rank} on all linear layers, {selection.base_dtype}, "
    head += f"activations stored in {selection.activation_dtype}."
    parts = [f"{head} {UNKNOWN}"]
    for f32, f16 in zip(answers["f32"], answers["f16"], strict=True):
        fastest = [pieces(answer, fastest=True) for answer in (f32, f16)]
        default = [seconds(pieces(answer, fastest=False)) for answer in (f32, f16)]
        fast = [seconds(step) for step in fastest]
        parts += [
            f"**{f32.gpu.title}**, subgroups of {f32.subgroup_size}, {f32.driver}, {f32.gpu.bandwidth / 1e9:.0f} GB/s, "
            "in the tilings that are the fastest by this model:",
            table(*fastest),
            f"The step in f16 is {fast[0] / fast[1]:.2f} times as fast as in f32 ({tokens / fast[1]:,.0f} and "
            f"{tokens / fast[0]:,.0f} tokens/s), and {default[0] / default[1]:.2f} times in the default tilings "
            f"({default[1]:.2f} s and {default[0]:.2f} s).",
        ]
    return "\n\n".join(part if part.startswith("|") else fill(part, WIDTH, break_on_hyphens=False) for part in parts)
