"""The next token of each sequence, chosen on the device from logits, masks, penalties and parameters of sampling."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import U32, Dim, In, InOut, Offset, Out, ReadOnly, kernel, linear_grid
from wgpu_lora.gpu.tiling import Capabilities, Tiling
from wgpu_lora.ops.loss.sparse_logits import LOWEST

NO_TOKEN = 0xFFFFFFFF  # of a row without a finite score
PARAMS = np.dtype(
    [("temperature", "f4"), ("top_p", "f4"), ("min_p", "f4"), ("draw", "f4"), ("top_k", "u4"), ("unused", "u4", 3)]
)  # of a row
UNITS = 2.0**31  # of probabilities


@kernel("mask_logits.wgsl", grid=lambda c: linear_grid(c.rows * c.cols), lib=("linear",))
def mask_logits(
    logits: In,
    masked: ReadOnly,
    masks: ReadOnly,
    scores: InOut,
    *,
    rows: Dim,
    cols: Dim,
    vocab: Dim,
    first: Offset[U32],
) -> Any:
    """scores[r, first + c] = logits[r, c], or LOWEST where masked[r] is set and bit first + c of masks[r] is not."""
    result = scores.reshape(rows, vocab).copy()
    words = masks.reshape(rows, -1).astype(np.uint32)
    mask = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, first : first + cols].astype(bool)
    hidden = (masked.reshape(rows, 1) != 0) & ~mask
    result[:, first : first + cols] = np.where(hidden, LOWEST, logits.reshape(rows, cols))
    return result


@kernel("edit_scores.wgsl", grid=lambda c: linear_grid(c.count), lib=("linear",))
def edit_scores(edits: ReadOnly, scores: InOut, *, count: Dim) -> Any:
    """scores[i] = scores[i] * factor if that is negative, else scores[i] / factor, minus a difference, for edits (i,
    factor, difference, 0) of different i; 0xffffffff: none. Scores of LOWEST stay."""
    words = edits.reshape(-1, 4).astype(np.uint32)
    entries = words[words[:, 0] != NO_TOKEN]
    index, factor, difference = entries[:, 0], entries[:, 1].view(np.float32), entries[:, 2].view(np.float32)
    result = scores.copy()
    old = result.reshape(-1)[index]
    new = np.clip(np.where(old < 0, old * factor, old / factor) - difference, -1e37, 1e37)
    result.reshape(-1)[index] = np.where(old < -1e38, old, new)
    return result


def _workgroups(capabilities: Capabilities, c: Any) -> list[Tiling]:
    return [Tiling(lanes=64 if capabilities.software else 256)]


@kernel("sample_tokens.wgsl.j2", grid=lambda c: (c.rows, 1, 1), variants=_workgroups)
def sample_tokens(scores: In, params: ReadOnly, ids: Out, *, rows: Dim, cols: Dim) -> Any:
    """ids[r] = the first of the largest scores at temperature 0, else a draw from softmax(scores[r] / temperature).

    Among the top_k most likely tokens (0: all), of these the most likely ones up to a probability of top_p, of these
    such with at least min_p times the largest probability; with ties. `draw` in [0, 1) decides, along the order of the
    ids. NO_TOKEN where a score is NaN or +infinite, or all are LOWEST."""
    settings = np.ascontiguousarray(params.astype(np.uint32)).reshape(-1).view(PARAMS)[:rows]
    return np.array([_sampled(row, of) for row, of in zip(scores.reshape(rows, cols), settings, strict=True)])


def _sampled(scores: np.ndarray, of: Any) -> int:
    top = scores.max()
    if np.isnan(scores).any() or top == np.inf or top < -1e38:
        return NO_TOKEN
    if of["temperature"] == 0:
        return int(scores.argmax())
    weights = np.exp(np.maximum((scores - top) / float(of["temperature"]), -100))
    masses, mask = np.floor(weights * (UNITS / weights.sum())).astype(np.int64), np.ones(scores.size, bool)
    if 0 < of["top_k"] < scores.size:
        mask &= scores >= np.partition(scores, -int(of["top_k"]))[-int(of["top_k"])]
    if of["top_p"] < 1:
        goal = max(1, int(masses[mask].sum() * float(of["top_p"])))
        order = np.argsort(-scores, kind="stable")
        reached = np.cumsum(np.where(mask, masses, 0)[order])
        mask &= scores >= scores[order[min(int(np.searchsorted(reached, goal)), scores.size - 1)]]
    reached = np.cumsum(np.where(mask & (weights >= of["min_p"]), masses, 0))
    if not reached[-1]:
        return int(scores.argmax())
    return int(np.searchsorted(reached, min(int(reached[-1] * float(of["draw"])), reached[-1] - 1), side="right"))
