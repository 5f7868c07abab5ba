"""Knowledge distillation: a divergence between a teacher's and the student's distribution of every trained token.

The divergences are those of TRL's GKD (Agarwal et al. 2024), over the teacher's K most likely tokens and all others as
one bucket, and are not multiplied by the square of the temperature, as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.kernel import F32, U32, Flag, In, Out, ReadOnly, by_subgroup, kernel, row_grid
from wgpu_lora.gpu.tensor import Tensor, align
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.ops.loss.loss import VocabularyLogprobs
from wgpu_lora.ops.loss.sparse_logits import LOWEST
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.train.distill.teacher_cache import read_header
from wgpu_lora.train.objectives.objective import Objective, Score, Scoring

METRICS = ("kd_loss", "hard_top1_loss", "hard_full_loss", "top1_agreement", "teacher_tail", "student_tail")


def divergence(lq: np.ndarray, lp: np.ndarray, forward: bool, reverse: bool, beta: float) -> tuple[Any, Any]:
    """(The divergence of each bucket [R, B], its derivative by lq), given log-probabilities of student and teacher."""
    p, q = np.exp(lp), np.exp(lq)
    if forward:
        return p * (lp - lq), -p
    if reverse:
        return q * (lq - lp), q * (lq - lp)
    mix = np.logaddexp(lq + np.log1p(-beta), lp + np.log(beta))
    return beta * p * (lp - mix) + (1 - beta) * q * (lq - mix), (1 - beta) * q * (lq - mix)


@kernel("objectives/kd.wgsl.j2", grid=row_grid(lambda c: c.rows), lib=("logistic",), variants=by_subgroup)
def kd_scores(
    picked: In, teacher: ReadOnly, places: ReadOnly, token_weights: ReadOnly, state: In, slopes: Out, values: Out,
    plain: In = None, *, rows: U32, kept: U32, stride: U32, rate: F32, kd: F32, top1: F32, full: F32,
    forward: Flag = False, reverse: Flag = False, beta: F32 = 0.5,
) -> Any:  # fmt: skip
    """slopes [R, K + 1] and values [0:2, r]: derivatives of weight * loss by picked logits, and the sum of those by all
    others, separately for temperature 1 if it has another softmax (`plain`); values[2:]: loss and metrics."""
    w, place = token_weights.reshape(-1), places.reshape(-1).astype(int)
    logits, lp = np.full((rows, kept + 2), -np.inf), teacher.reshape(rows, kept + 1).astype(np.float64)
    row, has_extra = np.arange(rows), place == kept
    logits[:, : kept + 1] = np.where(np.arange(kept + 1) < kept + has_extra[:, None], picked.reshape(rows, -1), -np.inf)

    def softmax(softmax_state: np.ndarray, by: float) -> np.ndarray:
        """Log-probabilities of K tokens, the target if it is not one of them, and the rest [R, K + 2]."""
        top, total = softmax_state.reshape(rows, 4)[:, :2].T
        with np.errstate(divide="ignore"):
            tail = np.where(total > 0, by * top + np.log(total), -np.inf)
        result = np.concatenate([by * logits[:, :-1], tail[:, None]], 1)
        return result - np.logaddexp.reduce(result, 1, keepdims=True)

    with np.errstate(invalid="ignore"):
        lq = softmax(state, rate)
        lq_tail = np.logaddexp(lq[:, kept], lq[:, kept + 1])
        buckets = np.concatenate([lq[:, :kept], lq_tail[:, None]], 1)
        real = (lp > LOWEST / 2) & np.isfinite(buckets)
        loss, slope = divergence(np.where(real, buckets, 0), np.where(real, lp, 0), forward, reverse, beta)
        loss, slope = np.where(real, loss, 0), np.where(real, slope, 0)
        by_bucket = rate * (slope - np.where(real, np.exp(buckets), 0) * slope.sum(1, keepdims=True))
        shares = np.where(np.isfinite(lq_tail)[:, None], np.exp(lq[:, kept:] - lq_tail[:, None]), 0)
        soft = kd * np.concatenate([by_bucket[:, :kept], by_bucket[:, kept:] * shares], 1)
        lq1 = lq if plain is None else softmax(plain, 1.0)
        hard = (top1 + full) * np.exp(lq1)
    hard[:, 0] -= top1
    hard[row, place] -= full
    rests = [hard[:, -1] if plain is not None else soft[:, -1] + hard[:, -1], hard[:, -1]]
    if plain is not None:
        rests[0] = soft[:, -1]
    has_plain = plain is not None or rate == 1
    top1_loss, full_loss = has_plain * -lq1[:, 0], has_plain * -lq1[row, place]
    largest, mass = state.reshape(rows, 4)[:, :2].T
    agrees = logits[:, 0] >= np.maximum(logits.max(1), np.where(mass > 0, largest, -np.inf))
    total = kd * loss.sum(1) + top1 * top1_loss + full * full_loss
    logged = [loss.sum(1), top1_loss, full_loss, agrees, np.exp(lp[:, kept]), np.exp(lq_tail)]
    result = np.zeros((9, stride))
    result[:, :rows] = np.where(w != 0, np.stack([w * rests[0], w * rests[1], total, *logged]), 0)
    slopes = (soft + hard)[:, : kept + 1]
    return np.where((w != 0)[:, None], w[:, None] * slopes, 0), result


@dataclass(frozen=True)
class KD(Objective):
    """kd_weight times the divergence at `temperature`, plus hard_top1_weight times the cross-entropy on the teacher's
    most likely token and hard_full_weight times that on the data's, both at temperature 1."""

    needs_teacher: ClassVar[bool] = True
    metrics: ClassVar[tuple[str, ...]] = METRICS

    teacher_cache: str | None = None
    eval_teacher_cache: str | None = None
    teacher: str | None = None
    teacher_adapter: str | None = None
    teacher_base_dtype: str | None = None
    teacher_top_k: int = 64
    temperature: float = 1.0
    kd_divergence: str = "forward_kl"
    kd_beta: float = 0.5
    kd_weight: float = 1.0
    hard_top1_weight: float = 0.0
    hard_full_weight: float = 0.0

    def __post_init__(self) -> None:
        if (self.teacher is None) == (self.teacher_cache is None):
            needs = f"{setting('objective', 'kd')} needs {'one' if self.teacher else 'a'} teacher"
            raise UserError(f"{needs}: give either {flag('teacher')} or {flag('teacher_cache')}.")
        if not (self.kd_weight or self.hard_top1_weight or self.hard_full_weight):
            names = f"{flag('kd_weight')}, {flag('hard_top1_weight')} and {flag('hard_full_weight')}"
            raise UserError(f"{names} are all 0, so there is nothing to train on: raise one of them.")

    @property
    def hard(self) -> bool:
        return bool(self.hard_top1_weight or self.hard_full_weight)

    @property
    def temperatures(self) -> tuple[float, ...]:
        return (1.0, self.temperature) if self.hard and self.temperature != 1 else (self.temperature,)

    @cached_property
    def support(self) -> int:
        return read_header(Path(self.teacher_cache)).top_k if self.teacher_cache else self.teacher_top_k

    def idle(self) -> dict[str, str]:
        result = (
            {}
            if self.kd_divergence == "jsd"
            else {"kd_beta": f"{setting('kd_divergence', self.kd_divergence)} has none"}
        )
        if self.teacher_cache:
            why = f"the teacher's tokens are those in {flag('teacher_cache')}"
            result |= dict.fromkeys(("teacher_adapter", "teacher_base_dtype", "teacher_top_k"), why)
        else:
            result["eval_teacher_cache"] = f"held-out rows have {flag('teacher')}, too"
        return result

    def logged(self, totals: Mapping[str, float], units: int) -> dict[str, float]:
        """Cross-entropies at temperature 1 are not known if they have no weight at another one."""
        unknown = METRICS[1:3] if 1.0 not in self.temperatures else ()
        return {name: value / units for name, value in totals.items() if name not in unknown}

    def score_vocabulary(self, rec: Recorder, vocabulary: VocabularyLogprobs, scoring: Scoring) -> Score:
        teacher = scoring.teacher
        assert teacher is not None
        rows, support = scoring.weights.size, self.support
        stride = align(4 * rows) // 4
        slopes, values = rec.temp((rows, support + 1), name="support slopes"), rec.temp((9, stride), name="kd")
        has_plain = len(self.temperatures) == 2
        rec.dispatch(
            kd_scores,
            vocabulary.support_logits[teacher.ids],
            teacher.logprobs,
            teacher.target_columns,
            scoring.weights,
            vocabulary.states[self.temperature],
            slopes,
            values,
            vocabulary.states[1.0] if has_plain else None,
            rows=rows,
            kept=support,
            stride=stride,
            rate=1 / self.temperature,
            kd=self.kd_weight,
            top1=self.hard_top1_weight,
            full=self.hard_full_weight,
            forward=self.kd_divergence == "forward_kl",
            reverse=self.kd_divergence == "reverse_kl",
            beta=self.kd_beta,
        )
        tail, plain_tail, losses, *metrics = (values.rows(i, i + 1).reshape(stride).rows(0, rows) for i in range(9))
        tails: dict[float, Tensor] = {self.temperature: tail, **({1.0: plain_tail} if has_plain else {})}
        logged = dict(zip(METRICS, metrics, strict=True))
        return Score(None, losses, logged, tails, {teacher.ids: slopes})
