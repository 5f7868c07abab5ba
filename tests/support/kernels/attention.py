"""Cases of attention: packed segments, windows, caches, grouped heads."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.kernels import CASES, NONE, Arrays, Case, add, normal, poison, synthetic, u32
from wgpu_lora.gpu.kernel import Kernel
from wgpu_lora.gpu.reference_values import as_float64
from wgpu_lora.ops.attention import attention


def packed(*segments: int, window: int = NONE) -> np.ndarray:
    """Ranges of segments that follow each other, each row seeing the last `window` keys of its own."""
    rows, start = [], 0
    for length in segments:
        stop = start + length
        rows += [(max(start, t + 1 - window), t + 1, min(stop, t + window), t) for t in range(start, stop)]
        start = stop
    return u32(*rows)


def forked(*pairs: tuple[int, int, int]) -> np.ndarray:
    """Ranges of pairs of sequences with a common prefix: (own rows of one, common rows, own rows of the other)."""
    rows, start = [], 0
    for own, common, other in pairs:
        fork, end = start + own, start + own + common
        stop = end + other
        rows += [(t, end, t + 1, start) for t in range(start, fork)]
        rows += [(fork, t + 1, stop, start) for t in range(fork, end)]
        rows += [(fork, t + 1, stop, t) for t in range(end, stop)]
        start = stop
    return u32(*rows)


def cached(rows: int, keys: int, window: int = NONE) -> np.ndarray:
    """The last `rows` queries over a cache of `keys`; the first of them sees nothing."""
    segments = [(max(0, t + 1 - window), t + 1, 0, 0) for t in range(keys - rows, keys)]
    return u32((5, 5, 0, 0), *segments[1:])


def cases(
    ranges: np.ndarray, keys: int, kv_heads: int, group: int, dim: int, backward: bool = True, cap: float = 0.0
) -> list[Case]:
    """The forward pass and, for `backward`, both gradients, else that by the queries."""
    rows = len(ranges)
    shape = {"rows": rows, "kv_heads": kv_heads, "group": group, "dim": dim, "scale": dim**-0.5, "cap": cap}
    heads = kv_heads * group

    def forward(rng: np.random.Generator) -> Arrays:
        arrays = synthetic(attention.attention_forward, rng, {**shape, "keys": keys})
        return {**arrays, "ranges": ranges, "y": poison(rows, heads, dim), "lse": poison(rows, heads)}

    def gradients(kernel: Kernel, rng: np.random.Generator) -> Arrays:
        arrays = {**synthetic(kernel, rng, {**shape, "keys": keys}), "ranges": ranges}
        wide = {name: as_float64(arrays[name]) for name in ("q", "k", "v", "ranges")}
        y, lse = attention.attention_forward(**wide, y=None, lse=None, keys=keys, **shape)
        delta = (y.reshape(rows, heads, dim) * arrays["dy"]).sum(axis=2)
        largest = np.abs(arrays["dy"]).max(axis=2)
        stats = np.stack([lse.reshape(rows, heads), delta, largest, 0 * delta], axis=2).astype(np.float32)
        return {**arrays, "stats": stats, **{name: poison(*arrays[name].shape) for name in kernel.outputs}}

    blind = np.repeat((ranges[:, 0] == ranges[:, 1])[:, None], heads, axis=1)
    slow, call = dim >= 64, {"keys": keys, **shape}
    by_query, by_key = attention.attention_backward_q, attention.attention_backward_kv
    return [
        Case(attention.attention_forward, forward, call, vague={"lse": blind}, slow=slow),
        Case(by_query, lambda rng: gradients(by_query, rng), call, slow=slow),
        *([Case(by_key, lambda rng: gradients(by_key, rng), shape, slow=slow)] if backward else []),
    ]


def attend(*args: Any, **options: Any) -> None:
    for case in cases(*args, **options):
        CASES[case.kernel.name].append(case)


attend(packed(5, 1, 20, 11), 37, kv_heads=2, group=3, dim=10)
attend(packed(19, window=4), 19, kv_heads=1, group=4, dim=64)
attend(packed(7, 16, window=3), 23, kv_heads=3, group=1, dim=20)
attend(packed(2, 1, window=2), 3, kv_heads=1, group=2, dim=4)
attend(forked((3, 6, 5), (9, 1, 2)), 26, kv_heads=2, group=2, dim=12)
attend(packed(5, 1, 20), 26, kv_heads=2, group=2, dim=10, cap=0.7)
attend(packed(6, 9, window=4), 15, kv_heads=1, group=2, dim=256, cap=0.3)
attend(packed(5, 9), 14, kv_heads=1, group=1, dim=140)
attend(cached(5, 37), 37, kv_heads=2, group=2, dim=6, backward=False, cap=1.5)
attend(cached(5, 37, window=30), 37, kv_heads=2, group=2, dim=6, backward=False)


def in_blocks(cache_dtype: str) -> None:
    """Ranges over 48 keys in blocks of 16, which lie anywhere."""
    ranges, shape = cached(5, 37), {"rows": 5, "kv_heads": 2, "group": 2, "dim": 12, "scale": 0.3}
    constants = {**shape, "keys": 48, "block": 16, "cache_dtype": cache_dtype}

    def make(rng: np.random.Generator) -> Arrays:
        arrays = synthetic(attention.attention_forward, rng, constants)
        return {**arrays, "ranges": ranges, "y": poison(5, 4, 12), "lse": poison(5, 4)}

    blind = np.repeat((ranges[:, 0] == ranges[:, 1])[:, None], 4, axis=1)
    add(attention.attention_forward, make, vague={"lse": blind}, **constants)


in_blocks("f32")
in_blocks("f16")
add(
    attention.attention_stats,
    lambda rng: {"y": normal(rng, 67, 10), "dy": normal(rng, 67, 10), "lse": normal(rng, 67), "stats": poison(67, 4)},
    rows=67,
    dim=10,
)
