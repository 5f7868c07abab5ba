"""The float64 reference of distillation's kernel: against differences by all logits, and against torch as in TRL."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from wgpu_lora.distill.teacher_logits import TeacherRows, TopKLogits, teacher_rows
from wgpu_lora.ops.sparse_logits import LOWEST
from wgpu_lora.train.objectives.kd import kd_scores

ROWS, VOCAB = 6, 13


def taught(logits: np.ndarray, kept: int, temperature: float, targets: np.ndarray) -> TeacherRows:
    """What a teacher with these logits says, who keeps all others as random tokens."""
    ids = np.argsort(-logits, axis=1, kind="stable").astype(np.uint32)
    lse = np.logaddexp.reduce(logits, 1)
    support = TopKLogits(ids, np.take_along_axis(logits, ids.astype(int), 1), lse, kept, np.zeros(len(lse)))
    rows = teacher_rows(support, targets, logits.shape[1], temperature)
    return TeacherRows(rows.ids, rows.logprobs.astype(np.float64), rows.places)


def scored(
    logits: np.ndarray, rows: TeacherRows, weights: np.ndarray, temperature: float, **constants: Any
) -> tuple[np.ndarray, np.ndarray]:
    """(the loss of each row, its derivatives by all logits), as the sweep computes them."""
    kept = rows.ids.shape[1] - 1
    used = np.arange(kept + 1) < kept + (rows.places == kept)[:, None]
    ids = np.where(used, rows.ids, 0).astype(int)
    rest = logits.copy()
    for r in range(len(logits)):
        rest[r, ids[r][used[r]]] = -np.inf
    empty = np.isinf(rest).all(1)

    def state(by: float) -> np.ndarray:
        top = np.where(empty, LOWEST, rest.max(1))
        total = np.exp(by * (rest - top[:, None])).sum(1)
        return np.stack([top, total, 0 * top, 0 * top], 1)

    def shares(by: float) -> np.ndarray:
        top, total = state(by)[:, :2].T
        return np.exp(by * (rest - top[:, None])) / np.where(empty, 1, total)[:, None]

    both = temperature != 1 and bool(constants.get("top1") or constants.get("full"))
    slopes, values = kd_scores(
        np.take_along_axis(logits, ids, 1), rows.logprobs, rows.places, weights, state(1 / temperature), None, None,
        state(1.0) if both else None, rows=len(logits), kept=kept, stride=64, rate=1 / temperature,
        **{"kd": 1.0, "top1": 0.0, "full": 0.0, "forward": False, "reverse": False, "beta": 0.5} | constants,
    )  # fmt: skip
    gradient = values[0, : len(logits), None] * shares(1 / temperature)
    gradient = gradient + (values[1, : len(logits), None] * shares(1.0) if both else 0)
    for r in range(len(logits)):
        np.add.at(gradient[r], ids[r][used[r]], slopes[r][used[r]])
    return values[2, : len(logits)], gradient


@pytest.mark.parametrize("kept", [4, VOCAB - 1, VOCAB])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize(
    "constants",
    [
        {"forward": True},
        {"reverse": True, "top1": 0.5},
        {"beta": 0.2, "kd": 0.7, "full": 0.3, "top1": 0.1},
        {"forward": True, "kd": 0.0, "full": 1.0},
    ],
    ids=["forward", "reverse", "jsd", "hard"],
)
def test_gradients_are_those_of_the_loss(kept: int, temperature: float, constants: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    logits, teacher = 2 * rng.standard_normal((2, ROWS, VOCAB))
    targets, weights = rng.integers(0, VOCAB, ROWS), rng.random(ROWS) + 0.5
    rows = taught(teacher, kept, temperature, targets)
    _, gradient = scored(logits, rows, weights, temperature, **constants)
    for v in range(VOCAB):
        step = np.zeros_like(logits)
        step[:, v] = 1e-5
        up, down = (scored(logits + s * step, rows, weights, temperature, **constants)[0] for s in (1, -1))
        np.testing.assert_allclose(gradient[:, v], weights * (up - down) / 2e-5, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("gap", [30.0, 300.0])
def test_a_student_that_is_sure(gap: float) -> None:
    """The bucket's share is e^-gap, which 1 minus the others would not tell from 0."""
    logits, teacher = np.zeros((1, VOCAB)), np.zeros((1, VOCAB))
    logits[0, 0], teacher[0, 0] = gap, 3.0
    rows = taught(teacher, 1, 1.0, np.array([0]))
    loss, gradient = scored(logits, rows, np.ones(1), 1.0, forward=True)
    p = 1 / (1 + 12 * np.exp(-3.0))
    assert loss[0] == pytest.approx(p * np.log(p) + (1 - p) * (np.log(1 - p) - np.log(12) + gap), rel=1e-5)
    np.testing.assert_allclose(gradient[0, 1:], -(1 - p) / 12 + np.exp(-gap), rtol=1e-5)


@pytest.mark.reference
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_torch_agrees(beta: float, temperature: float) -> None:
    """The generalised Jensen-Shannon divergence of TRL's GKDTrainer, of all tokens, and autograd's gradient."""
    torch = pytest.importorskip("torch")
    kl_div = torch.nn.functional.kl_div
    rng = np.random.default_rng(0)
    student, teacher = 2 * rng.standard_normal((2, ROWS, VOCAB))
    x = torch.tensor(student, requires_grad=True)
    lq, lp = (torch.log_softmax(logits / temperature, -1) for logits in (x, torch.tensor(teacher)))
    if beta in (0.0, 1.0):
        each = (
            kl_div(lq, lp, reduction="none", log_target=True)
            if beta == 0
            else kl_div(lp, lq, reduction="none", log_target=True)
        )
    else:
        share = torch.tensor(beta, dtype=torch.float64)
        mix = torch.logsumexp(torch.stack([lq + torch.log1p(-share), lp + torch.log(share)]), 0)
        of_teacher, of_student = (kl_div(mix, own, reduction="none", log_target=True) for own in (lp, lq))
        each = beta * of_teacher + (1 - beta) * of_student
    each.sum().backward()
    rows = taught(teacher, VOCAB, temperature, np.zeros(ROWS, int))
    chosen = {"forward": beta == 0, "reverse": beta == 1, "beta": beta}
    losses, gradient = scored(student, rows, np.ones(ROWS), temperature, **chosen)
    np.testing.assert_allclose(losses, each.sum(-1).detach().numpy(), rtol=1e-6)
    np.testing.assert_allclose(gradient, x.grad.numpy(), rtol=1e-5, atol=1e-7)
