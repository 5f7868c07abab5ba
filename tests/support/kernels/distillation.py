"""Cases of the kernel of distillation."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.kernels import Arrays, add, normal, poison, u32
from wgpu_lora.ops.loss.sparse_logits import LOWEST
from wgpu_lora.train.objectives import kd

ROWS, STRIDE = 67, 128


def distilled(count: int, temperature: float = 1.0, whole: bool = False, **constants: Any) -> None:
    """Rows 60 on are unused. whole: the support is the vocabulary, so that nothing is left beside it."""
    plain_state = temperature != 1 and bool(constants.get("top1") or constants.get("full"))

    def make(rng: np.random.Generator) -> Arrays:
        weights = rng.random(ROWS, np.float32) + 0.5
        weights[60:] = 0
        lp = 3 * normal(rng, ROWS, count + 1)
        lp -= np.logaddexp.reduce(lp, 1, keepdims=True)
        places, picked = rng.integers(0, count + 1, ROWS, np.uint32), 3 * normal(rng, ROWS, count + 1)
        state, plain = normal(rng, ROWS, 4), normal(rng, ROWS, 4)
        state[:, 1], plain[:, 1] = 1 + rng.random((2, ROWS), np.float32)
        plain[:, 0] = state[:, 0]
        state[::7, 0] -= 40  # the student leaves next to nothing to the rest
        plain[::7, 0] -= 40
        lp[::5, count] = np.log(1e-6)
        if whole:
            places, state[:, :2] = places % u32(count), (LOWEST, 0)
            lp = np.concatenate([lp[:, :count], np.full((ROWS, 1), LOWEST)], 1)
        picked[places < count, count] = np.nan
        picked[60:], state[60:] = np.nan, np.nan
        arrays = {"picked": picked, "teacher": lp.astype(np.float32), "places": places, "token_weights": weights}
        arrays |= {"state": state, "slopes": poison(ROWS, count + 1), "values": np.zeros((9, STRIDE), np.float32)}
        return arrays | ({"plain": plain} if plain_state else {})

    usual = {"kd": 1.0, "top1": 0.0, "full": 0.0}
    shape = {"rows": ROWS, "kept": count, "stride": STRIDE, "rate": 1 / temperature}
    add(kd.kd_scores, make, note="whole" if whole else "", **usual | shape | constants)


distilled(11, forward=True, top1=0.5, full=0.25)
distilled(3, 2.0, top1=0.5, full=0.25, beta=0.3)
distilled(11, 2.0, reverse=True)
distilled(11, whole=True, forward=True)
distilled(11, 0.5, whole=True, beta=0.5)
