"""Inputs for every kernel: shapes that are awkward in several ways at once, and few, because each is a compilation.

The first case of a kernel is its core case: other drivers and the bounds-checked mode run that one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import Kernel
from wgpu_lora.gpu.tiling import Tiling

Arrays = dict[str, np.ndarray]
NONE = 0xFFFFFFFF


@dataclass(frozen=True)
class Case:
    """One call of a kernel. Outputs in the arrays are what they hold before it.

    spared: tiling -> first row of an output that it leaves alone although the reference computes it.
    vague: outputs -> places whose value nobody may rely on.
    coarse: outputs that are rounded to a few values, of which a value near a border may take either, and the input
        that moves them.
    """

    kernel: Kernel
    make: Callable[[np.random.Generator], Arrays]
    constants: dict[str, Any]
    spared: Callable[[Tiling], int] | None = None
    vague: dict[str, np.ndarray] = field(default_factory=dict)
    slow: bool = False  # to compile: one tiling is enough
    rare: bool = False  # left to the slow tests
    coarse: tuple[str, ...] = ()
    moving: str = ""
    note: str = ""  # tells cases of the same constants apart

    @property
    def label(self) -> str:
        parts = [n if v is True else v if isinstance(v, str) else f"{n}{v:g}" for n, v in self.constants.items() if v]
        return "-".join(filter(None, [self.kernel.name, *parts, self.note]))

    def outputs(self, arrays: Arrays) -> list[str]:
        return [name for name in self.kernel.outputs if name in arrays]


CASES: dict[str, list[Case]] = defaultdict(list)


def add(
    kernel: Kernel,
    make: Callable[[np.random.Generator], Arrays],
    spared: Any = None,
    vague: Any = None,
    slow: bool = False,
    rare: bool = False,
    note: str = "",
    coarse: tuple[str, ...] = (),
    moving: str = "",
    **constants: Any,
) -> None:
    CASES[kernel.name].append(Case(kernel, make, constants, spared, vague or {}, slow, rare, coarse, moving, note))


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def poison(*shape: int, value: float = np.nan) -> np.ndarray:
    return np.full(shape, value, np.float32)


def synthetic(kernel: Kernel, rng: np.random.Generator, constants: dict[str, Any], *left_out: str) -> Arrays:
    """The inputs that a heavy kernel declares for its tuning, but for optional ones left out."""
    assert kernel.tuning is not None
    present = tuple(name for name in kernel.bindings if name not in left_out)
    return kernel.tuning.inputs({**kernel.defaults, **constants}, present, rng)


def u32(*values: Any) -> np.ndarray:
    return np.array(values, np.uint32)


SLOTS = u32((2, 9), (9, 9), (11, 27))  # an empty slot, and rows of no slot before, between and after
SLOT_ROWS = 29


def unslotted(array: np.ndarray) -> np.ndarray:
    """Rows of no slot may hold anything."""
    array[[0, 1, 9, 10, 27, 28]] = np.nan
    return array
