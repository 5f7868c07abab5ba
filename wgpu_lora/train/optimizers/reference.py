"""What the float64 references of updates share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from wgpu_lora.gpu.part import some_blocks
from wgpu_lora.gpu.struct import struct_columns, struct_fields
from wgpu_lora.ops.optimizer import BLOCK, MAX_PARAMETER, NO_OWNER

# (Hyper by value, parameters, gradient, state...) -> new (parameters, state...)
Moved = Callable[..., tuple[Any, ...]]
BF16_MAX = 3.3895313892515355e38


def part_of(*states: str) -> Any:
    """The part to check of a kernel over pages with these tensors of state."""
    return some_blocks(" ".join(["params", "grads", *states, "block_owners", "diverged"]), BLOCK)


def owned(
    record: type, block_owners: Any, hyper: Any, report: Any, size: int
) -> tuple[np.ndarray, np.ndarray, SimpleNamespace, np.ndarray]:
    """(whether it has an owner, whether it is updated, its Hyper, its clipping factor) of each of `size` values."""
    owner = np.repeat(block_owners.astype(np.int64), BLOCK)[:size]
    used = owner != NO_OWNER
    owner = np.where(used, owner, 0)
    columns = struct_columns(record, hyper)
    by_value = {name: getattr(columns, name)[owner] for name in struct_fields(record)}
    _, factor, fine, _ = report.reshape(-1, 4)[owner // 2].T
    return used, used & (fine != 0), SimpleNamespace(**by_value), factor


def updated(
    moved: Moved,
    record: type,
    params: Any,
    grads: Any,
    states: Sequence[Any],
    block_owners: Any,
    hyper: Any,
    report: Any,
) -> tuple[Any, ...]:
    """(parameters, gradients, states...) after an update."""
    used, go, h, factor = owned(record, block_owners, hyper, report, params.size)
    new = moved(h, params, grads * factor, *states)
    params, *kept = (np.where(go, now, old) for now, old in zip(new, (params, *states), strict=False))
    return params, np.where(used, 0, grads), *kept


def diverging(
    moved: Moved,
    record: type,
    params: Any,
    grads: Any,
    states: Sequence[Any],
    block_owners: Any,
    hyper: Any,
    report: Any,
    largest: float = float(np.finfo(np.float32).max),
) -> np.ndarray:
    """1 for each block that would have a parameter beyond MAX_PARAMETER, or a state beyond `largest`; else 0."""
    _, go, h, factor = owned(record, block_owners, hyper, report, params.size)
    params, *kept = moved(h, params, grads * factor, *states)
    bad = ~(np.abs(params) <= MAX_PARAMETER)
    for values, _ in zip(kept, states, strict=False):
        bad |= ~(np.abs(values) <= largest)
    found: np.ndarray = (go & bad).reshape(-1, BLOCK).any(axis=1).astype(np.float64)
    return found
