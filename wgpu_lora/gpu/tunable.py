"""What a kernel says of its calls, so that the tuner can time its tilings without knowing what it computes."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

Arrays = dict[str, np.ndarray]
Constants = dict[str, Any]  # of a call, by the names of the kernel's keyword parameters


class Tunable(Protocol):
    """Declared with a kernel that is worth tuning (`@kernel(..., tuning=...)`).

    sizes: the dims by which a choice is kept. Calls whose dims have the same nearest powers of two share one.
    batch: those of the sizes and of the constants that a batch's rows and adapters decide. Calls that differ in
        nothing else work on matrices of one size, and one may take over the choice of another.
    """

    @property
    def sizes(self) -> tuple[str, ...]: ...

    @property
    def batch(self) -> tuple[str, ...]: ...

    def work(self, c: Constants) -> float:
        """Multiply-adds of a call, by which calls are ordered."""

    def cut(self, c: Constants) -> Constants:
        """A smaller call that compiles to the same shaders, small enough for a float64 reference."""

    def inputs(self, c: Constants, present: tuple[str, ...], rng: np.random.Generator) -> Arrays:
        """Synthetic arrays of the bindings `present`, outputs among them, on which shader and reference agree."""
