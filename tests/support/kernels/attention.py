"""Cases of attention: packed segments, windows, caches, grouped heads."""

from __future__ import annotations

import numpy as np

from support.kernels import NONE, Arrays, add, normal, poison, u32
from wgpu_lora.gpu.single import widened
from wgpu_lora.ops import attention


def packed(*segments: int, window: int = NONE) -> np.ndarray:
    """Ranges of segments that follow each other, each row seeing the last `window` keys of its own."""
    rows, start = [], 0
    for length in segments:
        stop = start + length
        rows += [(max(start, t + 1 - window), t + 1, min(stop, t + window), 0) for t in range(start, stop)]
        start = stop
    return u32(*rows)


def cached(rows: int, keys: int, window: int = NONE) -> np.ndarray:
    """The last `rows` queries over a cache of `keys`; the first of them sees nothing."""
    seen = [(max(0, t + 1 - window), t + 1, 0, 0) for t in range(keys - rows, keys)]
    return u32((5, 5, 0, 0), *seen[1:])


def attend(ranges: np.ndarray, keys: int, kv_heads: int, group: int, dim: int, backward: bool = True) -> None:
    rows = len(ranges)
    shape = {"rows": rows, "kv_heads": kv_heads, "group": group, "dim": dim, "scale": dim**-0.5}
    q_shape, k_shape = (rows, kv_heads * group, dim), (keys, kv_heads, dim)

    def common(rng: np.random.Generator) -> Arrays:
        return {"q": normal(rng, *q_shape), "k": normal(rng, *k_shape), "v": normal(rng, *k_shape), "ranges": ranges}

    def forward(rng: np.random.Generator) -> Arrays:
        return {**common(rng), "y": poison(*q_shape), "lse": poison(*q_shape[:2])}

    def gradients(rng: np.random.Generator, *names: str) -> Arrays:
        arrays = {**common(rng), "dy": normal(rng, *q_shape)}
        wide = {n: widened(arrays[n]) for n in ("q", "k", "v", "ranges")}
        y, lse = attention.attention_forward(**wide, y=None, lse=None, keys=keys, **shape)
        delta = (y.reshape(q_shape) * arrays["dy"]).sum(axis=2)
        stats = np.stack([lse.reshape(q_shape[:2]), delta], axis=2).astype(np.float32)
        return {**arrays, "stats": stats, **{n: poison(*(q_shape if n == "dq" else k_shape)) for n in names}}

    blind = np.repeat((ranges[:, 0] == ranges[:, 1])[:, None], kv_heads * group, axis=1)
    slow = dim >= 64
    add(attention.attention_forward, forward, vague={"lse": blind}, slow=slow, keys=keys, **shape)
    add(attention.attention_backward_q, lambda rng: gradients(rng, "dq"), slow=slow, keys=keys, **shape)
    if backward:
        add(attention.attention_backward_kv, lambda rng: gradients(rng, "dk", "dv"), slow=slow, **shape)


attend(packed(5, 1, 20, 11), 37, kv_heads=2, group=3, dim=10)
attend(packed(19, window=4), 19, kv_heads=1, group=4, dim=64)
attend(packed(7, 16, window=3), 23, kv_heads=3, group=1, dim=20)
attend(packed(2, 1, window=2), 3, kv_heads=1, group=2, dim=4)
attend(cached(5, 37, window=30), 37, kv_heads=2, group=2, dim=6, backward=False)
add(
    attention.attention_stats,
    lambda rng: {"y": normal(rng, 67, 10), "dy": normal(rng, 67, 10), "lse": normal(rng, 67), "stats": poison(67, 2)},
    rows=67,
    dim=10,
)
