"""Cases of the kernels that work on a few tokens of the vocabulary per row."""

from __future__ import annotations

import numpy as np

from support.kernels import NONE, Arrays, add, normal, poison, u32
from wgpu_lora.ops import support

ROWS, KEPT, COLS, FIRST, COUNT = 67, 5, 37, 74, 61


def kept(rng: np.random.Generator) -> np.ndarray:
    """Ids before, in and behind the chunk, and of no token."""
    ids = np.stack([rng.permutation(FIRST + 2 * COLS)[:KEPT] for _ in range(ROWS)]).astype(np.uint32)
    ids[::4, 0], ids[1::4, 1], ids[2::4, 2] = FIRST, FIRST + COLS - 1, NONE
    return ids


def logits(rng: np.random.Generator) -> np.ndarray:
    return np.where(np.arange(ROWS)[:, None] < COUNT, normal(rng, ROWS, COLS), np.float32(np.nan)).astype(np.float32)


def picking(rng: np.random.Generator) -> Arrays:
    return {"logits": logits(rng), "ids": kept(rng), "count": u32(COUNT), "picked": poison(ROWS, KEPT, value=7.0)}


def hiding(rng: np.random.Generator) -> Arrays:
    return {"ids": kept(rng), "count": u32(COUNT), "logits": normal(rng, ROWS, COLS)}


add(support.pick_logits, picking, rows=ROWS, kept=KEPT, cols=COLS, first=FIRST)
add(support.hide_logits, hiding, rows=ROWS, kept=KEPT, cols=COLS, first=FIRST)
