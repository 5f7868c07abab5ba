"""Cases of the kernels that work row by row."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np

from support.kernels import NONE, SLOT_ROWS, SLOTS, Arrays, add, normal, poison, u32, unslotted
from wgpu_lora.gpu.struct import struct_array
from wgpu_lora.ops import half, loss, moments, norm, optimizer
from wgpu_lora.train.objectives import sft
from wgpu_lora.train.optimizers import adamw


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


def softmax(first: int, rows: int = 67, cols: int = 37, count: int = 61) -> None:
    def make(rng: np.random.Generator) -> Arrays:
        state = normal(rng, rows, 4) ** 2 if first else poison(rows, 4)
        targets = rng.integers(0, first + 2 * cols, rows, np.uint32)
        return {
            "logits": 5 * normal(rng, rows, cols),
            "targets": targets,
            "count": u32(count),
            "state": state,
            "rescale": normal(rng, rows),
        }

    add(loss.softmax_chunk, make, rows=rows, cols=cols, first=first)


softmax(first=37)
softmax(first=0)


def finished(rng: np.random.Generator, rows: int = 67, cols: int = 37, count: int = 61) -> Arrays:
    """Rows from `count` on hold nothing, and of those before some have no weight."""
    state, weights, dh = normal(rng, rows, 4) ** 2 + 0.1, normal(rng, rows), normal(rng, rows, cols)
    weights[::3], state[:count:3], dh[:count:3] = 0, np.nan, np.nan
    state[count:], weights[count:], dh[count:] = np.nan, np.nan, np.nan
    arrays = {"state": state.astype(np.float32), "weights": weights, "count": u32(count)}
    return {**arrays, "head_rows": normal(rng, rows, cols), "dh": dh}


def scored(rng: np.random.Generator, rows: int = 67, count: int = 61) -> Arrays:
    state = normal(rng, rows, 4) ** 2 + 0.1
    state[count:] = np.nan
    return {"state": state.astype(np.float32), "count": u32(count), "logprobs": poison(rows)}


def weighted(rng: np.random.Generator, rows: int = 67) -> Arrays:
    logprobs, weights = -(normal(rng, rows) ** 2), normal(rng, rows)
    logprobs[::3], weights[::3] = np.nan, 0
    return {"logprobs": logprobs, "weights": weights, "losses": poison(rows)}


add(loss.target_logprobs, scored, rows=67)
add(loss.logprob_gradient, finished, rows=67, cols=37)
add(sft.sft_loss, weighted, rows=67)
add(
    loss.sum_by_slot,
    lambda rng: {"x": unslotted(normal(rng, SLOT_ROWS)), "ranges": SLOTS, "total": normal(rng, 3)},
    slots=3,
)
add(optimizer.square_sums, lambda rng: {"x": normal(rng, 67 * optimizer.BLOCK), "sums": poison(67)}, blocks=67)

HYPER_SLOTS = 5  # usual, of no block, unlimited norm, inactive, of a loss that is not finite


def hypers(rng: np.random.Generator) -> np.ndarray:
    random = (rng.random((HYPER_SLOTS, 9)) * 0.5 + 0.25).tolist()
    return struct_array(adamw.Hyper, [replace(adamw.Hyper(*values), eps=1e-8) for values in random])


def clips() -> np.ndarray:
    records = [optimizer.Clip(1.0), optimizer.Clip(1.0), optimizer.Clip(0.0), None, optimizer.Clip(1.0)]
    return struct_array(optimizer.Clip, records)


def norms(rng: np.random.Generator) -> Arrays:
    block_slots = u32(*rng.choice([0, 2, 3, 4, NONE], 37))
    slot_loss = normal(rng, HYPER_SLOTS)
    slot_loss[4] = np.nan
    report = poison(HYPER_SLOTS, 4, value=7e29)  # a NaN is expected in places
    return {
        "sums": rng.random(37, np.float32),
        "block_slots": block_slots,
        "clips": clips(),
        "loss": slot_loss,
        "report": report,
    }


def updates(rng: np.random.Generator) -> Arrays:
    block_slots, size = u32(0, NONE, 3, 2, 0, 4), 6 * optimizer.BLOCK - 36
    report = normal(rng, HYPER_SLOTS, 4)
    report[:, 2] = 1, 1, 1, 0, 0
    values = {name: normal(rng, size) for name in ("params", "grads", "first_moment", "second_moment")}
    values["grads"][2 * optimizer.BLOCK : 3 * optimizer.BLOCK] = np.nan
    values["second_moment"] **= 2
    return {**values, "block_slots": block_slots, "hyper": hypers(rng), "report": report}


def checks(rng: np.random.Generator) -> Arrays:
    """Blocks of slot 0: one that is left in order, and one for each way to leave it; then what is not looked at."""
    block_slots = u32(0, 0, 0, 0, 0, 0, NONE, 3, 2)
    arrays = updates(rng) | {"block_slots": block_slots, "diverged": poison(block_slots.size)}
    values = {n: normal(rng, block_slots.size, optimizer.BLOCK) for n in ("params", "grads", "first_moment")}
    values["second_moment"] = normal(rng, block_slots.size, optimizer.BLOCK) ** 2
    values["params"][1, 1023] = np.nan
    values["params"][2, 77] = -np.inf
    values["params"][3, 500] = -2.0 * optimizer.MAX_PARAMETER
    values["params"][[6, 7, 8], 0] = np.nan
    values["first_moment"][4, 3] = np.inf
    values["second_moment"][5, 1000] = np.inf
    return {**arrays, **{n: v.reshape(-1) for n, v in values.items()}}


def gates(rng: np.random.Generator) -> Arrays:
    block_slots = u32(*rng.choice([0, 2, 3, 4, NONE], 37))
    diverged = ((block_slots == NONE) | (block_slots == 3)).astype(np.float32)
    diverged[np.flatnonzero(block_slots == 3)[1:]] = 0
    return {"diverged": diverged, "block_slots": block_slots, "report": normal(rng, HYPER_SLOTS, 4)}


add(optimizer.gradient_norm, norms, slots=HYPER_SLOTS, blocks=37)
add(adamw.adamw_check, checks, blocks=9)
add(optimizer.update_gate, gates, slots=HYPER_SLOTS, blocks=37)
add(adamw.adamw, updates, size=6 * optimizer.BLOCK - 36)


def rounded(kind: str, rows: int, cols: int) -> None:
    def make(rng: np.random.Generator) -> Arrays:
        x = normal(rng, rows, cols) * 10.0 ** rng.uniform(-9, 9, (rows, 1)).astype(np.float32)
        x[1] = 0
        y = poison(rows, cols).astype(np.float16 if kind == "f16" else ml_dtypes.bfloat16)
        arrays = {"x": x.astype(np.float32), "y": y if kind == "f16" else y.view(np.uint16)}
        return {**arrays, "scale": poison(rows)} if kind == "f16" else arrays

    add(half.to_half, make, rows=rows, cols=cols, kind=kind)


rounded("bf16", 37, 74)
rounded("f16", 37, 74)


def observed(first: int) -> None:
    def make(rng: np.random.Generator) -> Arrays:
        return {"x": normal(rng, 40, 37), "count": u32(61), "squares": normal(rng, 37) ** 2}

    add(moments.input_squares, make, rows=40, first=first, cols=37)


observed(first=40)
observed(first=64)
