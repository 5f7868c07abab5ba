"""Cases of the kernels that work on a few tokens of the vocabulary per row."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from support.kernels import NONE, Arrays, add, normal, poison, u32
from wgpu_lora.ops.loss import sparse_logits

ROWS, KEPT, COLS, WIDTH, FIRST, COUNT = 67, 5, 37, 10, 74, 61


def token_ids(rng: np.random.Generator) -> np.ndarray:
    """Ids before, in and behind the chunk, and of no token."""
    ids = np.stack([rng.permutation(FIRST + 2 * COLS)[:KEPT] for _ in range(ROWS)]).astype(np.uint32)
    ids[::4, 0], ids[1::4, 1], ids[2::4, 2] = FIRST, FIRST + COLS - 1, NONE
    return ids


def logits(rng: np.random.Generator) -> np.ndarray:
    return np.where(np.arange(ROWS)[:, None] < COUNT, normal(rng, ROWS, COLS), np.float32(np.nan)).astype(np.float32)


def picking(rng: np.random.Generator) -> Arrays:
    return {"logits": logits(rng), "ids": token_ids(rng), "count": u32(COUNT), "picked": poison(ROWS, KEPT, value=7.0)}


def gathering(kind: str) -> None:
    def make(rng: np.random.Generator) -> Arrays:
        weights, table = normal(rng, ROWS, KEPT), normal(rng, COLS, WIDTH)
        weights[::5], weights[COUNT:] = 0, np.nan
        stored = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}[kind]
        operand = table.astype(stored).view(np.uint16 if kind == "bf16" else stored)
        return {
            "weights": weights,
            "ids": token_ids(rng),
            "count": u32(COUNT),
            "b": operand,
            "y": normal(rng, ROWS, WIDTH),
        }

    constants = {"rows": ROWS, "kept": KEPT, "cols": WIDTH, "first": FIRST, "size": COLS, "b_type": kind}
    add(sparse_logits.support_product, make, **constants)


def hiding(rng: np.random.Generator) -> Arrays:
    return {"ids": token_ids(rng), "count": u32(COUNT), "logits": normal(rng, ROWS, COLS)}


add(sparse_logits.pick_logits, picking, rows=ROWS, kept=KEPT, cols=COLS, first=FIRST)
add(sparse_logits.hide_logits, hiding, rows=ROWS, kept=KEPT, cols=COLS, first=FIRST)


def largest(k: int, first: int, cols: int = COLS, tied: bool = False) -> None:
    """Of the chunk's first row, none is kept; of its second, as many as there is room for."""

    def make(rng: np.random.Generator) -> Arrays:
        old = min(k, first)
        values, ids = poison(ROWS, k), np.full((ROWS, k), NONE, np.uint32)
        values[:COUNT, :old] = normal(rng, COUNT, old)
        chunk = normal(rng, ROWS, cols)
        if tied:  # with both zeros, which are equal
            values, chunk = np.trunc(values), np.trunc(chunk)
        chunk[0] -= 100
        chunk[1] += 100
        chunk[COUNT:] = np.nan
        for row in ids[:COUNT]:
            row[:old] = np.sort(rng.permutation(max(1, first))[:old])
        best = {"best": poison(ROWS, k, value=7.0), "best_ids": np.full((ROWS, k), NONE - 1, np.uint32)}
        return {"logits": chunk, "count": u32(COUNT), "values": values, "ids": ids, **best}

    add(sparse_logits.top_k, make, note="tied" if tied else "", rows=ROWS, k=k, cols=cols, first=first)


largest(9, 74)
largest(9, 74, tied=True)
largest(40, 0)  # more than the chunk has
largest(100, 90)  # some of the chunk fill what is left
largest(9, 0, tied=True)
for kind in ("f32", "bf16", "f16"):
    gathering(kind)
