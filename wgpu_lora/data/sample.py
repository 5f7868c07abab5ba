"""Samples: the unit of data that an objective trains on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wgpu_lora.data.formats import Example, parse_example


@dataclass(frozen=True)
class Sample:
    """Examples that belong together, and a value from the row whose meaning the objective defines."""

    examples: tuple[Example, ...]
    value: float = 1.0


ReadSample = Callable[[dict[str, Any]], Sample]


def one_example(row: dict[str, Any]) -> Sample:
    """Read a row that is one example in any of the formats. Raises UserError."""
    return Sample((parse_example(row),))
