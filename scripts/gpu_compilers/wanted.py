"""What is asked of the compilers, which child processes get as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from wgpu_lora.weights.base_formats import DEFAULT_FORMAT


@dataclass(frozen=True)
class Wanted:
    """What to compile: shapes by name, attention of these sizes of heads, and for a training step its options.

    candidates: whether to compile every tiling that the tuner may choose, or only the default.
    kernels: parts of names, () for all. tiling: is compiled beside a matching kernel's own, if it is tuned.
    """

    shapes: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = ()
    tokens: int = 512
    rank: int = 16
    compute_dtype: str = "f32"
    candidates: bool = True
    kernels: tuple[str, ...] = ()
    tiling: dict[str, Any] | None = None
    activation_dtype: str = "f32"
    base_dtype: str = DEFAULT_FORMAT

    @classmethod
    def from_json(cls, text: str) -> Wanted:
        given: dict[str, Any] = json.loads(text)
        given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        return cls(**given)
