"""Made-up inputs for the heavy kernels at a call's own sizes, for the tuner to check and time their tilings on."""

from __future__ import annotations

from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
Rng = np.random.Generator


def _values(rng: Rng, kind: str, *shape: int) -> np.ndarray:
    values = rng.standard_normal(shape, np.float32)
    if kind == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16) if kind == "f16" else values


def matmul(c: Any, present: tuple[str, ...], rng: Rng) -> Arrays:
    """Of matmul_nt, matmul_nn and the NF4 products."""
    out, size_in = (c.n, c.k) if c.form == "nt" else (c.k, c.n)
    arrays = {
        "a": _values(rng, c.a_type, c.m, c.k + getattr(c, "a_skip", 0)),
        "y": _values(rng, "f32", c.m, c.n + getattr(c, "y_skip", 0)),
        "bias": _values(rng, "f32", c.n + getattr(c, "y_skip", 0)),
        "row_scale": _values(rng, "f32", c.m),
        "a_scale": _values(rng, "f32", c.m),
        "count": np.array([c.m], np.uint32),
    }
    if c.b_type == "nf4":
        arrays["codes"] = rng.integers(0, 2**32, (-(-size_in // 8), out), np.uint32)
        arrays["scales"] = rng.random(-(-out * size_in // 64), np.float32) + 0.5
    else:
        arrays["b"] = _values(rng, c.b_type, out, size_in)
    return {name: arrays[name] for name in present}


def lora(c: Any, present: tuple[str, ...], rng: Rng) -> Arrays:
    """Of lora_nt, lora_nn and lora_tn: the rows divided evenly among the slots."""
    rows = c.k if c.form == "tn" else c.m
    bounds = np.linspace(0, rows, c.slots + 1).astype(np.uint32)
    stacked = _values(rng, "f32", c.slots, c.stride)
    if c.form == "tn":
        arrays = {"a": _values(rng, "f32", rows, c.m), "b": _values(rng, "f32", rows, c.n), "y": stacked}
    else:
        arrays = {"a": _values(rng, "f32", rows, c.k), "b": stacked, "y": _values(rng, "f32", rows, c.n)}
    arrays |= {"ranges": np.stack([bounds[:-1], bounds[1:]], axis=1) + np.uint32(c.first_row)}
    arrays |= {"scale": _values(rng, "f32", c.slots)}
    return {name: arrays[name] for name in present}


def attention(c: Any, present: tuple[str, ...], rng: Rng) -> Arrays:
    """Of attention_forward and its two gradients: one causal sequence."""
    heads, keys = c.kv_heads * c.group, getattr(c, "keys", c.rows)
    q, k = (c.rows, heads, c.dim), (keys, c.kv_heads, c.dim)
    last = np.arange(1, c.rows + 1) + (keys - c.rows)
    ranges = np.stack([np.zeros(c.rows), last, np.full(c.rows, c.rows), np.zeros(c.rows)], axis=1)
    stats = np.stack([np.full((c.rows, heads), 4.0), np.zeros((c.rows, heads))], axis=2)
    arrays = {name: _values(rng, "f32", *q) for name in ("q", "y", "dy", "dq")}
    arrays |= {name: _values(rng, "f32", *k) for name in ("k", "v", "dk", "dv")}
    arrays |= {"lse": np.zeros((c.rows, heads), np.float32), "stats": stats.astype(np.float32)}
    arrays |= {"ranges": ranges.astype(np.uint32)}
    return {name: arrays[name] for name in present}
