"""longrope (Ding et al. 2024): other frequencies for sequences that are longer than the pretrained context.

All tokens of a sequence have the frequencies of its length so far, as in transformers. So a sequence that grows beyond
the pretrained context is computed again from its beginning (`ModelConfig.switch`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.models.fields import whole
from wgpu_lora.models.rope import RopeScaling, RopeTable, Rotary, positive, rotary_dim, stated_rope
from wgpu_lora.models.rows import Rows


@dataclass(frozen=True)
class LongRopeScaling(RopeScaling):
    """`factors` divide the frequencies of sequences up to the original length, `long_factors` those of longer ones."""

    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class TableRows:
    """The row of each token in a `LongRopeTable`. switch: tokens of the longest sequence with short factors."""

    switch: int
    width = 1

    def values(self, rows: Rows) -> np.ndarray:
        return 2 * rows.positions + (rows.lengths > self.switch)

    def padding(self, values: np.ndarray) -> int:
        return 0


@dataclass(frozen=True)
class LongRopeTable(RopeTable):
    """Each position has two rows, of a sequence up to the original length and of a longer one."""

    @property
    def places(self) -> TableRows:
        assert self.rope_scaling
        return TableRows(self.rope_scaling.original_max_position_embeddings)

    def shape(self, positions: int) -> tuple[int, ...]:
        return 2 * positions, self.rotary_dim // 2, 2

    def values(self, positions: int) -> np.ndarray:
        scaling = self.rope_scaling
        assert isinstance(scaling, LongRopeScaling)
        long = replace(self, rope_scaling=replace(scaling, factors=scaling.long_factors))
        both = [super(LongRopeTable, table).values(positions) for table in (self, long)]
        return np.stack(both, axis=1).reshape(self.shape(positions))


def rope_table(config: Rotary) -> RopeTable:
    """The table of a config's rotary embedding."""
    kind = LongRopeTable if isinstance(config.rope_scaling, LongRopeScaling) else RopeTable
    return kind.of(config)


def parse_longrope(
    d: Mapping[str, Any], head_dim: int, partial: float, positions: int, where: str
) -> LongRopeScaling | None:
    """Reads longrope's parameters; None if config.json states plain rotary embedding.

    Args:
        positions: max_position_embeddings.

    Raises:
        UserError: the rope type is another one, or a field is missing or invalid.
    """
    rope = stated_rope(d, where)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ("longrope", "su", "yarn"):  # earlier names, which transformers still reads
        raise UserError(f"rope_type {kind!r:.100} in {where} is not supported: use a model with default or longrope.")
    name = "original_max_position_embeddings"
    found = (place[name] for place in (d, rope) if place.get(name) is not None)
    original = whole({name: next(found, 4096)}, name, where)
    factor = positive(rope.get("factor") or positions / original, "rope factor", where)
    if rope.get("attention_factor") is not None:
        attention = positive(rope["attention_factor"], "attention_factor", where)
    else:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    pairs = rotary_dim(head_dim, partial) // 2
    short, long = (_factors(rope, name, pairs, where) for name in ("short_factor", "long_factor"))
    return LongRopeScaling("longrope", factor, original, attention_factor=attention, factors=short, long_factors=long)


def _factors(rope: Mapping[str, Any], name: str, pairs: int, where: str) -> tuple[float, ...]:
    values = rope.get(name)
    if not isinstance(values, list) or len(values) != pairs:
        raise UserError(f"{name} in {where} must list {pairs} numbers, one per rotated pair: correct the file.")
    return tuple(positive(value, name, where) for value in values)
