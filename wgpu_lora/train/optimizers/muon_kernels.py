"""Muon's kernels.

Newton-Schulz iterates on the small side of a factor: with G = X X^T for the `rank` vectors X of A or B, an iteration
X' = P X with P = a I + b G + c G^2 leads to G' = P G P, and the result is the product of all P with X.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import F32, U32, Fixed, Flag, In, InOut, Out, kernel, one_per
from wgpu_lora.gpu.part import some_blocks
from wgpu_lora.gpu.struct import struct_columns
from wgpu_lora.ops.optimizer import BLOCK, MAX_PARAMETER, NO_OWNER
from wgpu_lora.ops.rows import by_subgroup, row_grid
from wgpu_lora.train.optimizers.reference import owned

EPS = 1e-7  # the least norm of a direction
HOME_WORDS = 8


@dataclass(frozen=True)
class Hyper:
    """rest = 1 - momentum, in float64."""

    learning_rate: F32
    weight_decay: F32
    momentum: F32
    rest: F32
    nesterov: F32
    original: F32


PART = some_blocks("grads momentum block_owners direction", BLOCK)


def moments(grads: Any, momentum: Any, block_owners: Any, hyper: Any, report: Any) -> tuple[Any, Any, Any, Any]:
    """(whether it has an owner, whether it is updated, new momentum, direction) of each value."""
    used, go, h, factor = owned(Hyper, block_owners, hyper, report, grads.size)
    g = grads * factor
    m = momentum + h.rest * (g - momentum)
    return used, go, m, np.where(h.nesterov != 0, g + h.momentum * (m - g), m)


@kernel(
    "optimizers/muon_direction.wgsl",
    grid=lambda c: one_per(c.size // 4),
    lib=("linear", "muon"),
    structs=(Hyper,),
    part=PART,
)
def muon_direction(
    grads: In, momentum: In, block_owners: Fixed, hyper: Fixed, report: In, direction: Out, *, size: U32
) -> Any:
    """direction = g + momentum (m' - g) with Nesterov's momentum, or m'; 0 for slots that take no step."""
    _, go, _, direction = moments(grads, momentum, block_owners, hyper, report)
    return np.where(go, direction, 0.0)


@kernel(
    "optimizers/muon_momentum.wgsl",
    grid=lambda c: one_per(c.size // 4),
    lib=("linear", "muon"),
    structs=(Hyper,),
    part=PART,
)
def muon_momentum(grads: InOut, momentum: InOut, block_owners: Fixed, hyper: Fixed, report: In, *, size: U32) -> Any:
    """m' = m + (1 - momentum) (g - m); zeroes gradients and skips gated slots."""
    used, go, m, _ = moments(grads, momentum, block_owners, hyper, report)
    return np.where(used, 0.0, grads), np.where(go, m, momentum)


def vectors(values: Any, home: Any, rank: int) -> np.ndarray:
    """The vectors of a matrix, [rank, length]: the rows of A, the columns of B."""
    owner, _, first, _, _, length, *_ = home
    found = values[first : first + rank * length]
    rows: np.ndarray = found.reshape(rank, length) if owner % 2 == 0 else found.reshape(length, rank).T
    return rows


@kernel(
    "optimizers/muon_gram.wgsl.j2",
    grid=row_grid(lambda c: c.matrices * c.rank * c.rank),
    lib=("muon",),
    structs=(Hyper,),
    variants=by_subgroup,
)
def muon_gram(direction: In, homes: Fixed, firsts: Fixed, gram: Out, *, matrices: U32, rank: U32) -> Any:
    """gram[n] = X X^T of matrix n, [rank, rank]."""
    all_homes, found = homes.reshape(-1, HOME_WORDS).astype(np.int64), np.zeros((matrices, rank, rank))
    for n, first in enumerate(firsts[:matrices]):
        x = vectors(direction, all_homes[first], rank)
        found[n] = x @ x.T
    return found


@kernel("optimizers/muon_normalise.wgsl", grid=lambda c: one_per(c.matrices * c.rank * c.rank), lib=("linear",))
def muon_normalise(gram: In, y: Out, norms: Out, *, matrices: U32, rank: U32, eps: F32 = EPS) -> Any:
    """norms = max(sqrt(trace(gram)), eps); y = gram / norms^2."""
    gram = gram.reshape(matrices, rank, rank)
    norms = np.maximum(np.sqrt(np.trace(gram, axis1=1, axis2=2)), eps)
    return gram / norms[:, None, None] ** 2, norms


@kernel("optimizers/muon_product.wgsl", grid=lambda c: one_per(c.matrices * c.rank * c.rank), lib=("linear",))
def muon_product(x: In, z: In, y: Out, *, matrices: U32, rank: U32, a: F32 = 0.0, b: F32 = 0.0, c: F32 = 1.0) -> Any:
    """y = a I + b x + c x z, for each matrix [rank, rank]."""
    x, z = (values.reshape(matrices, rank, rank) for values in (x, z))
    return a * np.eye(rank) + b * x + c * (x @ z)


def stepped(
    params: Any, direction: Any, q: Any, norms: Any, homes: Any, hyper: Any, rank: int
) -> Iterator[tuple[int, slice, np.ndarray]]:
    """(slot, place in the page, new parameters) of each matrix."""
    h, q = struct_columns(Hyper, hyper), q.reshape(-1, rank, rank)
    for home in np.unique(homes.reshape(-1, HOME_WORDS).astype(np.int64), axis=0):
        owner, number, first, _, _, length, own, _ = home
        if owner == NO_OWNER:
            continue
        is_a, place = owner % 2 == 0, slice(first, first + rank * length)
        o = q[number] @ vectors(direction, home, rank) / norms[number]
        rows, cols = (own, length) if is_a else (length, own)
        scale = np.sqrt(max(1, rows / cols)) if h.original[owner] else 0.2 * np.sqrt(max(rows, cols))
        rate = h.learning_rate[owner]
        moved = (o if is_a else o.T).reshape(-1)
        yield owner // 2, place, params[place] * (1 - rate * h.weight_decay[owner]) - rate * scale * moved


@kernel(
    "optimizers/muon.wgsl.j2",
    grid=lambda c: one_per(c.blocks * BLOCK),
    lib=("linear", "muon"),
    structs=(Hyper,),
)
def muon(
    params: InOut,
    direction: In,
    q: In,
    norms: In,
    homes: Fixed,
    hyper: Fixed,
    report: In,
    *,
    blocks: U32,
    rank: U32,
    checking: Flag = False,
) -> Any:
    """p = p (1 - lr wd) - lr scale (q x) / norm, by matrix; skips gated slots."""
    found, fine = params.copy(), report.reshape(-1, 4)[:, 2] != 0
    for slot, place, new in stepped(params, direction, q, norms, homes, hyper, rank):
        found[place] = new if fine[slot] else params[place]
    return found


@kernel(
    "optimizers/muon.wgsl.j2",
    grid=row_grid(lambda c: c.blocks),
    lib=("muon",),
    structs=(Hyper,),
    variants=by_subgroup,
)
def muon_check(
    params: In,
    direction: In,
    q: In,
    norms: In,
    homes: Fixed,
    hyper: Fixed,
    report: In,
    diverged: Out,
    *,
    blocks: U32,
    rank: U32,
    limit: F32 = MAX_PARAMETER,
    checking: Flag = True,
) -> Any:
    """diverged[b] = 1 if `muon` would make a parameter of block b larger than limit, or a value non-finite."""
    bad, fine = np.zeros(params.size, bool), report.reshape(-1, 4)[:, 2] != 0
    for slot, place, new in stepped(params, direction, q, norms, homes, hyper, rank):
        with np.errstate(invalid="ignore"):
            bad[place] = (~(np.abs(new) <= limit) | ~np.isfinite(direction[place])) & fine[slot]
    return bad.reshape(blocks, BLOCK).any(axis=1).astype(np.float64)
