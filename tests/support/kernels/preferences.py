"""Cases of the kernels of preference objectives."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.kernels import Arrays, add, normal, poison, u32
from wgpu_lora.gpu.kernel import Kernel
from wgpu_lora.train.objectives import cpo, dpo, grpo, kto, orpo, preference

SIZE, STRIDE, ROWS, UNUSED = 67, 128, 1000, 5  # the last groups are padding


def spans(rng: np.random.Generator, count: int, context: bool) -> tuple[np.ndarray, np.ndarray]:
    """Answers' [start, stop) of the groups in use, with gaps that belong to no segment; and where targets begin."""
    lengths = rng.integers(1, 9, (SIZE, count))
    before = rng.integers(0, 3, (SIZE, count)) if context else np.zeros((SIZE, count), int)
    stops = np.cumsum(lengths + 3).reshape(SIZE, count)
    bounds = np.stack([stops - lengths, stops], 2)
    starts = bounds[:, :, 0] - before
    bounds[SIZE - UNUSED :], starts[SIZE - UNUSED :] = 0, 0
    return u32(bounds.tolist()), u32(starts.tolist())


def summed(count: int, context: bool) -> Any:
    def make(rng: np.random.Generator) -> Arrays:
        answers, starts = spans(rng, count, context)
        logprobs = -(normal(rng, 2 * ROWS) ** 2)
        sums = poison(SIZE, count, 2)
        return {"logprobs": logprobs, "members": answers, "starts": starts, "sums": sums}

    return make


def spread(count: int, context: bool) -> Any:
    def make(rng: np.random.Generator) -> Arrays:
        answers, starts = spans(rng, count, context)
        slopes, weights = normal(rng, SIZE, count, 2), np.zeros(2 * ROWS, np.float32)
        return {"slopes": slopes, "members": answers, "starts": starts, "weights": weights}

    return make


def scored(kernel: Kernel, logged: int, scale: float = 1.0, **constants: Any) -> None:
    """A loss by group, of log-probabilities of this scale."""
    count = 1 if kernel is kto.kto_scores else 2

    def make(rng: np.random.Generator) -> Arrays:
        def logs(*shape: int) -> np.ndarray:
            values = (-np.abs(normal(rng, SIZE, *shape)) * scale).astype(np.float32)
            # Large ones are multiples of 1/16, whose differences f32 holds: what matters are the losses of small ones.
            return np.round(16 * values) / 16 if scale > 1 else values

        sums, weights = logs(count, 2), rng.random(SIZE, np.float32) + 0.5
        weights[SIZE - UNUSED :], sums[SIZE - UNUSED :] = 0, np.nan
        arrays = {
            "sums": sums,
            "members": spans(rng, count, False)[0],
            "reference": logs(count),
            "group_weights": weights,
            "values": np.sign(normal(rng, SIZE)),
            "shared_values": rng.random(SIZE, np.float32),
            "slopes": poison(SIZE, count, 2),
            "losses": poison(SIZE),
            "metrics": poison(logged, STRIDE),
        }
        return {name: arrays[name] for name in kernel.bindings}

    add(kernel, make, size=SIZE, stride=STRIDE, beta=0.3, note=f"scale{scale:g}", **constants)


add(preference.member_sums, summed(2, True), size=SIZE, count=2, ld_alpha=0.25)
add(preference.member_sums, summed(1, False), size=SIZE, count=1)
add(preference.member_weights, spread(2, True), size=SIZE, count=2, ld_alpha=0.25)
add(preference.member_weights, spread(1, False), size=SIZE, count=1)

# All losses together; and each where the others would hide its extremes, at log-ratios of hundreds.
scored(dpo.dpo_scores, 6, label_smoothing=0.1, **dict.fromkeys(dpo.LOSSES, 0.7))
for loss in dpo.LOSSES:
    scored(dpo.dpo_scores, 6, 1e3, label_smoothing=0.1, **{loss: 1.0})
for loss in cpo.LOSSES:
    flags = {name: name == loss for name in ("hinge", "ipo", "simpo")}
    scored(cpo.cpo_scores, 7, label_smoothing=0.1, gamma=0.5, alpha=0.7, mean=loss in cpo.MEANS, **flags)
scored(cpo.cpo_scores, 7, 1e3, label_smoothing=0.0, gamma=0.5, alpha=0.0)
for scale in (1.0, 1e4, 1e-3):
    scored(orpo.orpo_scores, 9, scale)
for scale in (1.0, 1e3):
    scored(kto.kto_scores, 7, scale, desirable=1.5, undesirable=0.5)


def completions(**constants: Any) -> None:
    """Losses of completions; those of every fifth have one token, and some no advantage."""

    def make(rng: np.random.Generator) -> Arrays:
        state, inputs = np.abs(normal(rng, 2 * ROWS, 4)) + 0.1, normal(rng, 2 * ROWS, 3)
        state[:, 1] += 1  # the sum of exponentials
        state[:, 2] = state[:, 0] - np.abs(normal(rng, 2 * ROWS))
        logp = state[:, 2] - state[:, 0] - np.log(state[:, 1])
        inputs[:, :2] = logp[:, None] + 0.5 * inputs[:, :2]
        inputs[:, 2] = rng.random(2 * ROWS) < 0.7
        weights, advantages = rng.random(SIZE, np.float32) + 0.5, normal(rng, SIZE)
        weights[SIZE - UNUSED :], advantages[::7] = 0, 0
        return {
            "state": state.astype(np.float32),
            "inputs": inputs.astype(np.float32),
            "members": spans(rng, 1, False)[0],
            "group_weights": weights,
            "advantages": advantages,
            "weights": np.zeros(2 * ROWS, np.float32),
            "values": poison(9, STRIDE),
        }

    add(grpo.grpo_scores, make, size=SIZE, stride=STRIDE, **{"rate": 1.0, **constants})


for own in ({}, {"delta": 1.5, "beta": 0.2}, {"cispo": True, "epsilon_high": 1.2}, {"sapo": True, "beta": 0.2}):
    completions(**own)
    completions(sequence=True, rate=1.25, **own)
completions(sequence=True, summed=True)
