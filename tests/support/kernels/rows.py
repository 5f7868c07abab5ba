"""Cases of the kernels that work row by row."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from support.kernels import SLOT_ROWS, SLOTS, Arrays, add, normal, poison, u32, unslotted
from wgpu_lora.gpu.reference_values import random_values
from wgpu_lora.ops import gradient_norm, half_precision, norm
from wgpu_lora.ops.loss import loss, sparse_logits
from wgpu_lora.train.objectives import sft


def normalise(rows: int, cols: int, accumulate: bool) -> None:
    def forward(rng: np.random.Generator) -> Arrays:
        return {
            "x": normal(rng, rows, cols),
            "weight": normal(rng, cols),
            "y": poison(rows, cols),
            "rstd": poison(rows),
        }

    def backward(rng: np.random.Generator) -> Arrays:
        rstd = rng.random(rows, np.float32) + 0.5
        return {**forward(rng), "rstd": rstd, "dy": normal(rng, rows, cols), "dx": normal(rng, rows, cols)}

    def forward_of_sum(rng: np.random.Generator) -> Arrays:
        return {**forward(rng), "branch": normal(rng, rows, cols), "total": poison(rows, cols)}

    add(norm.rmsnorm_forward, forward_of_sum if accumulate else forward, rows=rows, cols=cols, eps=1e-6)
    add(
        norm.rmsnorm_backward,
        lambda rng: {n: a for n, a in backward(rng).items() if n != "y"},
        rows=rows,
        cols=cols,
        accumulate=accumulate,
    )


normalise(67, 37, True)
normalise(32771, 3, False)  # more rows than a grid has in one dimension


def softmax(
    first: int, rows: int = 67, cols: int = 37, count: int = 61, rate: float = 1.0, cap: float = 0.0, **more: bool
) -> None:
    """At another rate, the exponentials are stored apart, some logits are hidden, and all of some rows'."""

    def make(rng: np.random.Generator) -> Arrays:
        state = normal(rng, rows, 4) ** 2 if first else poison(rows, 4)
        targets, logits = rng.integers(0, first + 2 * cols, rows, np.uint32), 5 * normal(rng, rows, cols)
        arrays = {"targets": targets, "count": u32(count), "state": state, "rescale": normal(rng, rows)}
        if cap:
            logits = (cap * np.tanh(logits / cap)).astype(np.float32)
        if rate != 1:
            logits[::3, ::5] = logits[7::20] = sparse_logits.LOWEST
            targets[::3] = first + 1
            arrays["apart"] = poison(rows, cols, value=5.0)
        return {"logits": logits, **arrays}

    add(loss.softmax_chunk, make, rows=rows, cols=cols, first=first, rate=rate, hidden=rate != 1, cap=cap, **more)


softmax(first=37)
softmax(first=0)
softmax(first=37, rate=0.5)
softmax(first=0, rate=0.5)
softmax(first=37, cap=6.0)
softmax(first=0, rate=0.5, cap=6.0)
softmax(first=0, rate=0.5, entropy=True)
softmax(first=37, rate=0.5, cap=6.0, entropy=True)


def finished(rng: np.random.Generator, rows: int = 67, cols: int = 37, count: int = 61) -> Arrays:
    """Rows from `count` on hold nothing, and of those before some have no weight."""
    state, weights, dh = normal(rng, rows, 4) ** 2 + 0.1, normal(rng, rows), normal(rng, rows, cols)
    weights[::3], state[:count:3], dh[:count:3] = 0, np.nan, np.nan
    state[count:], weights[count:], dh[count:] = np.nan, np.nan, np.nan
    arrays = {"state": state.astype(np.float32), "weights": weights, "count": u32(count)}
    return {**arrays, "head_rows": normal(rng, rows, cols), "dh": dh}


def rests(rng: np.random.Generator) -> Arrays:
    arrays = finished(rng)
    return {
        **{n: arrays[n] for n in ("state", "count", "dh")},
        "rests": arrays["weights"],
        "total": normal(rng, 67, 37),
    }


def scored(rng: np.random.Generator, rows: int = 67, count: int = 61) -> Arrays:
    state = normal(rng, rows, 4) ** 2 + 0.1
    state[count:] = np.nan
    return {"state": state.astype(np.float32), "count": u32(count), "logprobs": poison(rows)}


def weighted(rng: np.random.Generator, rows: int = 67) -> Arrays:
    logprobs, weights = -(normal(rng, rows) ** 2), normal(rng, rows)
    logprobs[::3], weights[::3] = np.nan, 0
    return {"logprobs": logprobs, "weights": weights, "losses": poison(rows)}


def predicted(rng: np.random.Generator, rows: int = 67, count: int = 61) -> Arrays:
    arrays = scored(rng, rows, count)
    arrays["state"][:count:3, 2] = arrays["state"][:count:3, 0]  # the target has the largest logit
    return {"state": arrays["state"], "count": arrays["count"], "hits": poison(rows)}


for rate in (1.0, 0.8):
    add(loss.target_logprobs, scored, rows=67, rate=rate)
    add(loss.logprob_gradient, finished, rows=67, cols=37, rate=rate)
add(loss.logprob_gradient, finished, rows=67, cols=37, cap=3.0)
for accumulate in (True, False):
    add(loss.rest_gradient, rests, rows=67, cols=37, accumulate=accumulate)
add(sft.sft_loss, weighted, rows=67)
add(loss.target_hits, predicted, rows=67)
for largest in (False, True):
    add(
        loss.sum_by_slot,
        lambda rng: {"x": unslotted(normal(rng, SLOT_ROWS)), "ranges": SLOTS, "total": np.abs(normal(rng, 3))},
        slots=3,
        largest=largest,
    )
add(gradient_norm.square_sums, lambda rng: {"x": normal(rng, 67 * gradient_norm.BLOCK), "sums": poison(67)}, blocks=67)


def rounded(kind: str, rows: int, cols: int) -> None:
    def make(rng: np.random.Generator) -> Arrays:
        x = normal(rng, rows, cols) * 10.0 ** rng.uniform(-9, 9, (rows, 1)).astype(np.float32)
        x[1] = 0
        y = poison(rows, cols).astype(np.float16 if kind == "f16" else ml_dtypes.bfloat16)
        arrays = {"x": x.astype(np.float32), "y": y if kind == "f16" else y.view(np.uint16)}
        return {**arrays, "scale": poison(rows)} if kind == "f16" else arrays

    add(half_precision.to_half, make, rows=rows, cols=cols, kind=kind)


rounded("bf16", 37, 74)
rounded("f16", 37, 74)


def restored(kind: str, rows: int, cols: int) -> None:
    def make(rng: np.random.Generator) -> Arrays:
        arrays = {"x": random_values(rng, kind, rows, cols), "y": poison(rows, cols)}
        return {**arrays, "scale": 2.0 ** rng.integers(-90, 90, rows).astype(np.float32)} if kind == "f16" else arrays

    add(half_precision.from_half, make, size=rows * cols, cols=cols, kind=kind)


restored("bf16", 37, 74)
restored("f16", 37, 74)
