"""What a compiler says about one compute pipeline."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


class Unreadable(Exception):
    """A driver did not print what its parser expects."""


@dataclass(frozen=True)
class Loop:
    """The innermost loop with the most multiply-adds.

    instructions: of one iteration, without those that only schedule others.
    multiplying: those of them that multiply and add.
    multiply_adds: of a lane; packed and dual instructions do two.
    """

    instructions: int
    multiplying: int
    multiply_adds: int

    @property
    def share(self) -> float:
        return self.multiplying / self.instructions


@dataclass(frozen=True)
class Compiled:
    """registers: 32-bit ones of a lane. spilled: values, or instructions that store them, as the driver counts.
    scratch: bytes of memory of a lane, for spills and for arrays that are indexed. shared: bytes of workgroup memory.
    occupancy: in the GPU's unit (see `devices`).
    """

    registers: int
    spilled: int
    scratch: int
    shared: int
    occupancy: int
    instructions: int
    loop: Loop | None

    @property
    def in_memory(self) -> bool:
        """Whether values that belong in registers are kept in memory."""
        return bool(self.spilled or self.scratch)


@dataclass(frozen=True)
class Instruction:
    """multiply_adds: that it does in a lane. scheduling: it only tells the GPU when others may start."""

    multiply_adds: int = 0
    scheduling: bool = False


def innermost(code: Sequence[Instruction], following: Sequence[Sequence[int]]) -> Loop | None:
    """The innermost loop with the most multiply-adds, wherever the compiler put its parts.

    following: of each instruction, the places in `code` of those that may run next.
    """
    preceding: list[list[int]] = [[] for _ in code]
    for place, after in enumerate(following):
        for target in after:
            preceding[target].append(place)
    bodies: dict[int, set[int]] = {}  # first instruction -> all of the loop, of natural loops
    for source, after in enumerate(following):
        for first in after:
            if first <= source:
                body, reached = {first}, [source]
                while reached:
                    place = reached.pop()
                    if place not in body:
                        body.add(place)
                        reached += preceding[place]
                if first == 0 or 0 not in body:  # else it can be entered elsewhere, so it is none
                    bodies.setdefault(first, set()).update(body)
    found = []
    for first, body in bodies.items():
        if any(other in body for other in bodies if other != first):
            continue
        counted = [code[place] for place in body if not code[place].scheduling]
        sums = sum(one.multiply_adds for one in counted)
        found.append(Loop(len(counted), sum(one.multiply_adds > 0 for one in counted), sums))
    return max(found, key=lambda loop: (loop.multiply_adds, loop.instructions), default=None)


def last_number(pattern: str, text: str, default: int | None = None) -> int:
    """The last number that a pattern with one group finds. Raises Unreadable if there is none and no default."""
    found = re.findall(pattern, text, re.MULTILINE)
    if not found and default is None:
        raise Unreadable(f"nothing matches {pattern!r}")
    return int(found[-1]) if found else int(default or 0)
