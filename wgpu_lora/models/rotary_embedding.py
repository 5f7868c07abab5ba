"""Rotary position embedding: the parameters of config.json, and the inverse frequencies and tables computed from them.

The formulas are those of transformers' `modeling_rope_utils.py`, computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.models.config_fields import boolean, whole
from wgpu_lora.models.row_inputs import RowInput, Rows

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DEFAULT_THETA = 10000.0
MIN_NUMBER, MAX_NUMBER = 1e-12, 1e12  # far beyond real models, and products of several stay finite


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the frequencies beyond the pretrained context, with config.json's names.

    rope_type: 'linear', 'llama3', 'yarn', 'longrope' or 'factors'. Fields that a type does not use keep their defaults.
    attention_factor: multiplies cos and sin (yarn and longrope only).
    factors: one per pair, divides its frequency. GGUF stores 'llama3' in this form.
    """

    rope_type: str
    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    factors: tuple[float, ...] = ()


class Rope(NamedTuple):
    """The rotary embedding of a config.json.

    scaling: None for plain rotary embedding. partial: the share of each head that is rotated.
    """

    theta: float
    scaling: RopeScaling | None = None
    partial: float = 1.0


def rope_fields(d: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The object of config.json with rope parameters, which may be one for each type of layer. Raises UserError."""
    # transformers 5 writes everything to rope_parameters, earlier versions rope_theta and rope_scaling.
    for name in ("rope_parameters", "rope_scaling"):
        if d.get(name) is not None and not isinstance(d[name], Mapping):
            raise UserError(
                f"{name} in {where} is {d[name]!r:.100}, expected an object such as {{'rope_type': 'default'}}: "
                "correct the file."
            )
    return d.get("rope_parameters") or d.get("rope_scaling") or {}


def parse_rope(
    d: Mapping[str, Any],
    max_position_embeddings: int,
    where: str,
    theta: float = DEFAULT_THETA,
    partial: float | None = None,
) -> Rope:
    """Reads the rope parameters of a config.json written by transformers 5 or earlier.

    Args:
        theta: default of rope_theta.
        partial: default of partial_rotary_factor; None if the architecture always rotates whole heads.

    Raises:
        UserError: the rope type is not supported, or a field is invalid.
    """
    rope = rope_fields(d, where)
    if any(isinstance(value, Mapping) and name.endswith("_attention") for name, value in rope.items()):
        raise UserError(f"rope_parameters in {where} differ by layer type, which is not supported: use another model.")
    theta = positive(rope.get("rope_theta", d.get("rope_theta", theta)), "rope_theta", where)
    share = _share(rope.get("partial_rotary_factor", d.get("partial_rotary_factor")), partial, where)
    return Rope(theta, _scaling(d, rope, theta, max_position_embeddings, where), share)


def rotary_dim(head_dim: int, partial: float) -> int:
    """The values of a head that are rotated, rounded down as in transformers."""
    return int(head_dim * partial)


def check_pairs(head_dim: int, partial: float, where: str) -> None:
    """Raises UserError unless the rotated values of a head are pairs."""
    result = rotary_dim(head_dim, partial)
    if result < 2 or result % 2:
        raise UserError(
            f"partial_rotary_factor {partial} in {where} rotates {result} of the {head_dim} values of a head, "
            "which are not pairs: correct it."
        )


def _share(value: Any, default: float | None, where: str) -> float:
    if value is None:
        return 1.0 if default is None else default
    share = positive(value, "partial_rotary_factor", where)
    if share > 1 or (share < 1 and default is None):
        advice = "only 1.0 is" if default is None else "use at most 1"
        raise UserError(f"partial_rotary_factor = {value!r} in {where} is not supported: {advice}.")
    return share


def _scaling(
    d: Mapping[str, Any], rope: Mapping[str, Any], theta: float, max_position_embeddings: int, where: str
) -> RopeScaling | None:
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in SUPPORTED_ROPE_TYPES:
        supported = ", ".join(SUPPORTED_ROPE_TYPES)
        raise UserError(
            f"rope_type {rope_type!r:.100} in {where} is not supported: use a model with one of {supported}."
        )
    if rope_type == "default":
        return None
    if rope_type == "yarn" and theta == 1:
        raise UserError(f"rope_theta in {where} is 1, which yarn cannot stretch: correct the file.")
    lengths = (config.get("original_max_position_embeddings") for config in (d, rope))
    original = next((value for value in lengths if value not in (None, 0)), max_position_embeddings)
    original = positive(original, "original_max_position_embeddings", where)
    factor = rope.get("factor")
    if factor is None and rope_type == "yarn":
        factor = max_position_embeddings / original
    factor = positive(factor, "rope factor", where)

    def field(name: str, default: float) -> float:
        return positive(default if rope.get(name) is None else rope[name], name, where)

    low, high = field("low_freq_factor", 1.0), field("high_freq_factor", 4.0)
    if high <= low:
        raise UserError(f"high_freq_factor {high} in {where} must be greater than low_freq_factor {low}: correct it.")
    return RopeScaling(
        rope_type=rope_type,
        factor=factor,
        original_max_position_embeddings=int(original),
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=field("beta_fast", 32.0),
        beta_slow=field("beta_slow", 1.0),
        truncate=boolean(rope, "truncate", where, True),
        attention_factor=_yarn_attention_factor(rope, factor, where) if rope_type == "yarn" else 1.0,
    )


class Rotary(Protocol):
    """The rotary embedding's fields of a config. rotary_dim: the values of a head that are rotated."""

    @property
    def rotary_dim(self) -> int: ...

    @property
    def rope_theta(self) -> float: ...

    @property
    def rope_scaling(self) -> RopeScaling | None: ...


@dataclass(frozen=True)
class RopeTable:
    """A table of cos and sin by position, f32 [positions, rotary_dim / 2, 2]."""

    rotary_dim: int
    rope_theta: float
    rope_scaling: RopeScaling | None

    @classmethod
    def of(cls, config: Rotary) -> Self:
        return cls(config.rotary_dim, config.rope_theta, config.rope_scaling)

    @property
    def table_rows(self) -> RowInput | None:
        """The row of each token in the table; None if these are their positions."""
        return None

    def shape(self, positions: int) -> tuple[int, ...]:
        return positions, self.rotary_dim // 2, 2

    def values(self, positions: int) -> np.ndarray:
        """The table, from f32 frequencies as in torch, with angles in float64."""
        angles = np.arange(positions)[:, None] * inv_freq(self).astype(np.float32).astype(np.float64)[None]
        return (np.stack([np.cos(angles), np.sin(angles)], axis=2) * attention_factor(self)).astype(np.float32)


def inv_freq(config: Rotary) -> np.ndarray:
    """Radians per position for each rotated pair: float64 [rotary_dim / 2].

    Pair i is (x[i], x[i + rotary_dim/2]), as in transformers' `rotate_half`. To get torch's angles at large positions,
    round the frequencies to float32 first, as torch stores them.
    """
    dim, scaling = config.rotary_dim, config.rope_scaling
    plain = config.rope_theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    if scaling is None:
        return plain
    if scaling.rope_type == "linear":
        return plain / scaling.factor
    if scaling.factors:
        return plain / np.array(scaling.factors)
    if scaling.rope_type == "llama3":
        return _llama3(plain, scaling)
    return _yarn(plain, scaling, config.rope_theta)


def attention_factor(config: Rotary) -> float:
    """The factor of cos and sin: 1 except for yarn and longrope."""
    return config.rope_scaling.attention_factor if config.rope_scaling else 1.0


def _llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Divides low frequencies by `factor`, keeps high ones, and interpolates between by rotations per context."""
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return (1 - keep) * plain / scaling.factor + keep * plain


def _yarn(plain: np.ndarray, scaling: RopeScaling, theta: float) -> np.ndarray:
    """Interpolates between scaled and plain frequencies along a linear ramp over the pair's index."""
    dim = 2 * len(plain)

    def pair_turning(rotations: float) -> float:
        """The (fractional) index of the pair that rotates `rotations` times within the original context."""
        context = scaling.original_max_position_embeddings
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    interpolated = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    return plain / scaling.factor * interpolated + plain * (1 - interpolated)


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float, where: str) -> float:
    if rope.get("attention_factor") is not None:
        return positive(rope["attention_factor"], "attention_factor", where)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        numerator = positive(rope["mscale"], "mscale", where)
        return mscale(numerator) / mscale(positive(rope["mscale_all_dim"], "mscale_all_dim", where))
    return mscale(1.0)


def positive(value: Any, name: str, where: str) -> float:
    """A positive number of config.json. Raises UserError."""
    if value is None:
        raise UserError(f"{name} is missing from {where}: restore the file from the model's source.")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not MIN_NUMBER <= value <= MAX_NUMBER:
        raise UserError(f"{name} in {where} is {value!r:.40}, expected a positive number: correct the file.")
    return float(value)


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
    def table_rows(self) -> TableRows:
        assert self.rope_scaling
        return TableRows(self.rope_scaling.original_max_position_embeddings)

    def shape(self, positions: int) -> tuple[int, ...]:
        return 2 * positions, self.rotary_dim // 2, 2

    def values(self, positions: int) -> np.ndarray:
        scaling = self.rope_scaling
        assert isinstance(scaling, LongRopeScaling)
        long = replace(self, rope_scaling=replace(scaling, factors=scaling.long_factors))
        tables = [super(LongRopeTable, table).values(positions) for table in (self, long)]
        return np.stack(tables, axis=1).reshape(self.shape(positions))


def rope_table(config: Rotary) -> RopeTable:
    """The table of a config's rotary embedding."""
    kind = LongRopeTable if isinstance(config.rope_scaling, LongRopeScaling) else RopeTable
    return kind.of(config)


def parse_longrope(
    d: Mapping[str, Any], head_dim: int, partial: float, positions: int, where: str
) -> LongRopeScaling | None:
    """Reads longrope's parameters; None if config.json has plain rotary embedding.

    Args:
        positions: max_position_embeddings.

    Raises:
        UserError: the rope type is another one, or a field is missing or invalid.
    """
    rope = rope_fields(d, where)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ("longrope", "su", "yarn"):  # earlier names, which transformers still reads
        raise UserError(f"rope_type {kind!r:.100} in {where} is not supported: use a model with default or longrope.")
    name = "original_max_position_embeddings"
    result = (config[name] for config in (d, rope) if config.get(name) is not None)
    original = whole({name: next(result, 4096)}, name, where)
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
