"""A fixed sample of test cases, the same at every commit for bisections; WGPU_LORA_TESTS_FULL runs all of them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

FULL = bool(os.environ.get("WGPU_LORA_TESTS_FULL"))
ROOT = Path(__file__).parents[2]
T = TypeVar("T")


def seeds(count: int, name: str) -> list[int]:
    """Fixed seeds, other ones by name."""
    return random.Random(name).sample(range(2**31), count)


def sample(cases: Sequence[T], share: float, always: Callable[[T], Any] = lambda case: False) -> list[T]:
    """A fixed share of the cases, in their order, at least one, and those that `always` names."""
    count = max(1, round(share * len(cases)))
    indices = set(range(len(cases)) if FULL else random.Random(0).sample(range(len(cases)), count))
    return [case for index, case in enumerate(cases) if index in indices or always(case)]
