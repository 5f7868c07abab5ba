"""Supervised fine-tuning: the mean cross-entropy of the trained tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from wgpu_lora.gpu.kernel import U32, In, Out, ReadOnly, kernel, linear_grid
from wgpu_lora.ops.loss.loss import VocabularyLogprobs, hits
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.train.objectives.objective import Objective, Score, Scoring

ACCURACY = "mean_token_accuracy"  # as TRL calls it


@kernel("objectives/sft.wgsl", grid=lambda c: linear_grid(c.rows), lib=("linear",))
def sft_loss(logprobs: In, weights: ReadOnly, losses: Out, *, rows: U32) -> Any:
    """losses = -logprobs; 0 for tokens of weight 0."""
    return np.where(weights.reshape(-1) != 0, -logprobs.reshape(-1), 0)


@dataclass(frozen=True)
class SFT(Objective):
    """Every trained token has the same weight: 1 / trained tokens of the optimizer step."""

    metrics: ClassVar[tuple[str, ...]] = (ACCURACY,)
    progress_metrics: ClassVar[tuple[str, ...]] = ()

    def score_vocabulary(self, rec: Recorder, vocabulary: VocabularyLogprobs, scoring: Scoring) -> Score:
        losses = rec.temp(vocabulary.logprobs.shape, name="losses")
        rec.dispatch(sft_loss, vocabulary.logprobs, scoring.weights, losses, rows=losses.size)
        return Score(scoring.weights, losses, {ACCURACY: hits(rec, vocabulary)})
