"""How a kernel describes its calls to the tuner."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from wgpu_lora.gpu.tiling import Tiling

Arrays = dict[str, np.ndarray]
Constants = dict[str, Any]  # of a call: the kernel's keyword parameters


class Tunable(Protocol):
    """Declared with a kernel that is worth tuning: `@kernel(..., tuning=...)`.

    sizes: the dims that choices are keyed by, each rounded to the nearest power of two.
    later: constants that were added after choices had been saved, with defaults that change nothing.
    """

    @property
    def sizes(self) -> tuple[str, ...]: ...

    @property
    def later(self) -> tuple[str, ...]: ...

    def work(self, c: Constants) -> float:
        """Multiply-adds of a call. The heaviest calls are tuned first."""

    def cut(self, c: Constants, tiling: Tiling) -> Constants:
        """A call that compiles to the same shader and is small enough to be compared with the float64 reference. It has
        whole blocks of the tiling, and a block that its edge cuts where the call has one."""

    def inputs(self, c: Constants, present: tuple[str, ...], rng: np.random.Generator) -> Arrays:
        """Synthetic arrays for the bindings `present`, including outputs."""
