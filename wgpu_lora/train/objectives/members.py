"""Sums of log-probabilities over the segments of groups, and tokens' weights from a loss's derivatives by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import F32, U32, Fixed, In, InOut, Out, kernel
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.elementwise import fill
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.ops.rows import by_subgroup, row_grid
from wgpu_lora.train.objectives.base import GroupTensors

ROWS: dict[str, Any] = {"grid": row_grid(lambda c: c.size * c.count), "variants": by_subgroup}


def factors(members: np.ndarray, ld_alpha: float) -> list[np.ndarray]:
    """The factor of each log-probability of a group's answers, [start, stop) each: 1 up to the length that all answers
    have, ld_alpha behind it (LD-DPO, Liu et al. 2024)."""
    lengths = [int(stop - start) for start, stop in members]
    return [np.where(np.arange(length) < min(lengths), 1.0, ld_alpha) for length in lengths]


@kernel("objectives/member_sums.wgsl.j2", **ROWS)
def member_sums(
    logprobs: In, members: Fixed, starts: Fixed, sums: Out, *, size: U32, count: U32, ld_alpha: F32 = 1.0
) -> Any:
    """sums = (sum of factor logprobs over the answer, sum of logprobs over all targets) of each segment."""
    spans, result = members.reshape(size, count, 2).astype(int), np.zeros((size, count, 2))
    for g in range(size):
        for m, factor in enumerate(factors(spans[g], ld_alpha)):
            (first, stop), start = spans[g, m], int(starts.reshape(size, count)[g, m])
            result[g, m] = (factor * logprobs[first:stop]).sum(), logprobs[start:stop].sum()
    return result


@kernel("objectives/member_weights.wgsl.j2", **ROWS)
def member_weights(
    slopes: In, members: Fixed, starts: Fixed, weights: InOut, *, size: U32, count: U32, ld_alpha: F32 = 1.0
) -> Any:
    """weights = -(factor slopes.x + slopes.y) in each segment, the first term for its answer only."""
    spans, weights = members.reshape(size, count, 2).astype(int), weights.copy()
    slopes = slopes.reshape(size, count, 2)
    for g in range(size):
        for m, factor in enumerate(factors(spans[g], ld_alpha)):
            (first, stop), start = spans[g, m], int(starts.reshape(size, count)[g, m])
            weights[start:stop] = -slopes[g, m, 1]
            weights[first:stop] -= factor * slopes[g, m, 0]
    return weights


def record_sums(rec: Recorder, logprobs: Tensor, groups: GroupTensors, ld_alpha: float = 1.0) -> Tensor:
    """Record `member_sums`, f32 [G, members, 2]."""
    size, members, _ = groups.members.shape
    sums = rec.temp((size, members, 2), name="member sums")
    shape: dict[str, Any] = {"size": size, "count": members, "ld_alpha": ld_alpha}
    rec.dispatch(member_sums, logprobs, groups.members, groups.starts, sums, **shape)
    return sums


def record_weights(
    rec: Recorder, slopes: Tensor, shape: Sequence[int], groups: GroupTensors, ld_alpha: float = 1.0
) -> Tensor:
    """Record the weights of R tokens from derivatives by `record_sums`, f32 [G, members, 2]."""
    size, members, _ = groups.members.shape
    weights = rec.temp(tuple(shape), name="weights")
    rec.dispatch(fill, weights, size=weights.size)
    given: dict[str, Any] = {"size": size, "count": members, "ld_alpha": ld_alpha}
    rec.dispatch(member_weights, slopes, groups.members, groups.starts, weights, **given)
    return weights
