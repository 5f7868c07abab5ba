"""What a row gives to learn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wgpu_lora.data.formats import Example, parse_example


@dataclass(frozen=True)
class Sample:
    """Examples that stay together, and a number that the row says of them, whatever an objective takes it for."""

    examples: tuple[Example, ...]
    value: float = 1.0


ReadSample = Callable[[dict[str, Any]], Sample]


def one_example(row: dict[str, Any]) -> Sample:
    """A row that is one example, in any of the formats. UserError where it fits none."""
    return Sample((parse_example(row),))
