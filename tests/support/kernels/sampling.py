"""Cases of the kernels that keep halves in a cache and choose tokens."""

from __future__ import annotations

import numpy as np

from support.kernels import NONE, Arrays, add, normal, poison, u32
from wgpu_lora.infer.request import Sampler
from wgpu_lora.ops.attention import rope
from wgpu_lora.ops.loss import sampling

ROWS, VOCAB, FIRST, COLS = 5, 301, 64, 171


def storing(rng: np.random.Generator) -> Arrays:
    x = normal(rng, 4 + 3 * 10)
    x[5], x[9], x[17] = 1e5, -1e6, 1e-7
    return {"x": x, "rows_of": u32(6, NONE, 0), "cache": normal(rng, 8, 10).astype(np.float16)}


add(rope.store_halves, storing, rows=3, cols=10, first=4)


def masking(rng: np.random.Generator) -> Arrays:
    masks = rng.integers(0, 2**32, (ROWS, -(-VOCAB // 32)), np.uint32)
    return {
        "logits": normal(rng, ROWS, COLS),
        "masked": u32(1, 0, 1, 1, 0),
        "masks": masks,
        "scores": poison(ROWS, VOCAB, value=2.0),
    }


add(sampling.mask_logits, masking, rows=ROWS, cols=COLS, vocab=VOCAB, first=FIRST)


def editing(rng: np.random.Generator) -> Arrays:
    scores = normal(rng, ROWS, VOCAB)
    scores[0, 3] = -3e38
    index = rng.permutation(ROWS * VOCAB)[:70].astype(np.uint32)
    index[0], index[1] = 3, NONE
    factors, less = rng.uniform(0.5, 2, 70).astype(np.float32), normal(rng, 70)
    return {
        "edits": np.stack([index, factors.view(np.uint32), less.view(np.uint32), 0 * index], axis=1),
        "scores": scores,
    }


add(sampling.edit_scores, editing, count=70)


def choosing(rng: np.random.Generator) -> Arrays:
    scores = normal(rng, ROWS, VOCAB)
    scores[3, 7] = np.nan
    settings = ((0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 20, 0.9, 0.05), (1.0, 0, 1.0, 0.0), (1.5, 0, 0.6, 0.0))
    rows = [Sampler(t, k, p, seed, m).row(4) for seed, (t, k, p, m) in enumerate(settings)]
    params = np.array(rows, sampling.PARAMS).view(np.uint32).reshape(ROWS, -1)
    return {"scores": scores, "params": params, "ids": np.full(ROWS, 9, np.uint32)}


add(sampling.sample_tokens, choosing, rows=ROWS, cols=VOCAB)
