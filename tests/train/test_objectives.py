"""An objective is one file and one line: one of pairs, with a reference, is added, trained, logged and resumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from support.models import allocated
from support.rows.preferences import Preferences
from support.rows.sources import write_source
from support.training.shared_runs import assert_resumes_exactly
from support.training.training import assert_gradient_is_slope, golden_arguments

from wgpu_lora.data import Row
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.kernel import F32, REGISTRY, U32, In, InOut, Kernel, Out, ReadOnly, kernel, linear_grid
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.infer.perplexity import Evaluator
from wgpu_lora.models.batch_inputs import Segment
from wgpu_lora.ops.elementwise import fill
from wgpu_lora.ops.loss.loss import logprob_gradient, softmax_chunk, target_logprobs
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.train.job import Job
from wgpu_lora.train.objectives import OBJECTIVES
from wgpu_lora.train.objectives.objective import Group, Objective, Score, Scoring
from wgpu_lora.train.option_types import Range, own_option
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.run.training_log import LOG, read_log

SCALE = 0.5
SHADER = """const SIZE: u32 = 1u;
const SCALE: f32 = 0.1;
@group(0) @binding(0) var<storage, read_write> logprobs: array<f32>;
@group(0) @binding(1) var<storage, read> members: array<array<vec2<u32>, 2>>;
@group(0) @binding(2) var<storage, read> reference: array<vec2<f32>>;
@group(0) @binding(3) var<storage, read> group_weights: array<f32>;
@group(0) @binding(4) var<storage, read> values: array<f32>;
@group(0) @binding(5) var<storage, read_write> weights: array<f32>;
@group(0) @binding(6) var<storage, read_write> losses: array<f32>;
@group(0) @binding(7) var<storage, read_write> margins: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let g = linear_index(group, local);
    if (g >= SIZE) { return; }
    losses[g] = 0.0;
    margins[g] = 0.0;
    if (group_weights[g] == 0.0) { return; }
    var sums: array<f32, 2>;
    for (var m = 0u; m < 2u; m++) {
        for (var r = members[g][m].x; r < members[g][m].y; r++) { sums[m] += logprobs[r]; }
    }
    let margin = SCALE * ((sums[0] - sums[1]) - (reference[g].x - reference[g].y));
    let w = group_weights[g] * values[g] * SCALE / (1.0 + exp(margin));
    for (var r = members[g][0].x; r < members[g][0].y; r++) { weights[r] = w; }
    for (var r = members[g][1].x; r < members[g][1].y; r++) { weights[r] = -w; }
    losses[g] = values[g] * log(1.0 + exp(-margin));
    margins[g] = margin;
}
"""


def scored_by(
    logprobs: Any, members: Any, reference: Any, group_weights: Any, values: Any, weights: Any, size: int, scale: float
) -> Any:
    weights, losses, margins = weights.copy(), np.zeros(size), np.zeros(size)
    for g in np.flatnonzero(group_weights):
        spans, base = members.reshape(size, 2, 2)[g].astype(int), reference.reshape(size, 2)[g]
        chosen, rejected = (logprobs[start:stop].sum() for start, stop in spans)
        margins[g] = scale * ((chosen - rejected) - (base[0] - base[1]))
        losses[g] = values[g] * np.log1p(np.exp(-margins[g]))
        for sign, (start, stop) in zip((1, -1), spans, strict=True):
            weights[start:stop] = sign * group_weights[g] * values[g] * scale / (1 + np.exp(margins[g]))
    return weights, losses, margins


@dataclass(frozen=True)
class Pairwise(Preferences):
    """-log sigmoid(scale (log-ratio of the chosen - log-ratio of the rejected)), ratios to the base alone, times
    the row's weight."""

    scale: float = own_option(0.1, "Scale of the log-ratios.", within=Range(above=0))
    unit: ClassVar = "group"
    reference: ClassVar[bool] = True
    metrics: ClassVar[tuple[str, ...]] = ("margin",)
    kernels: ClassVar[list[Kernel]] = []

    def score(self, rec: Recorder, logprobs: Tensor, scoring: Scoring) -> Score:
        groups = scoring.groups
        weights, size = rec.temp(logprobs.shape, name="weights"), groups.weights.size
        losses, margins = rec.temp((size,), name="losses"), rec.temp((size,), name="margins")
        rec.dispatch(fill, weights, size=weights.size)
        tensors = logprobs, groups.members, groups.reference, groups.weights, groups.values
        rec.dispatch(Pairwise.kernels[0], *tensors, weights, losses, margins, size=size, scale=self.scale)
        return Score(weights, losses, {"margin": margins})


@pytest.fixture(autouse=True)
def pairwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registers it for a test."""
    (tmp_path / "pairwise.wgsl").write_text(SHADER)

    @kernel(str(tmp_path / "pairwise.wgsl"), grid=lambda c: linear_grid(c.size), lib=("linear",))
    def pairwise_scores(
        logprobs: In, members: ReadOnly, reference: ReadOnly, group_weights: ReadOnly, values: ReadOnly, weights: InOut,
        losses: Out, margins: Out, *, size: U32, scale: F32,
    ) -> Any:  # fmt: skip
        """loss = -log sigmoid(scale margin), and each token's weight in it."""
        return scored_by(logprobs, members, reference, group_weights, values, weights, size, scale)

    monkeypatch.setattr(Pairwise, "kernels", [pairwise_scores])
    OBJECTIVES["pairwise"] = Pairwise
    yield
    del OBJECTIVES["pairwise"], REGISTRY["pairwise_scores"]


def pairs(path: Path, count: int = 6, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)

    def ids(least: int, most: int) -> list[int]:
        return rng.integers(0, 301, rng.integers(least, most)).tolist()

    rows = [
        {"prompt_ids": ids(1, 4), "chosen_ids": ids(2, 7), "rejected_ids": ids(2, 7), "weight": rng.random()}
        for _ in range(count)
    ]
    return write_source(path, rows)


def job(directory: Path, **changes: Any) -> Job:
    directory.mkdir(exist_ok=True)
    options = {"data": str(pairs(directory / "pairs.jsonl")), "max_steps": 4, "base_dtype": "f32"}
    if "objective" not in changes:
        options |= {"objective": "pairwise", "objective_args": f"scale={SCALE}"}
    return prepare_job(golden_arguments(directory, "qwen2", **{**options, **changes}))


def test_gradients_are_those_of_the_loss(rng: np.random.Generator) -> None:
    """In float64, by the kernels' references: central differences by every hidden value."""
    cols, vocab, rows = 5, 11, 9
    hidden, head, targets = rng.normal(size=(rows, cols)), rng.normal(size=(vocab, cols)), rng.integers(0, vocab, rows)
    members, base = np.array([[(0, 2), (2, 5)], [(0, 0)] * 2]), rng.normal(size=(2, 2))
    count = np.array([rows])

    def swept(hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        logits = hidden @ head.T
        p, state, _ = softmax_chunk(
            logits, targets, count, np.zeros((rows, 4)), np.zeros(rows), rows=rows, cols=vocab, first=0
        )
        return target_logprobs(state, count, None, rows=rows), state, p @ head

    def scored(hidden: np.ndarray) -> Any:
        return scored_by(
            swept(hidden)[0], members, base, np.array([0.25, 0.0]), np.array([3.0, 1.0]), np.zeros(rows), 2, SCALE
        )

    _, state, dh = swept(hidden)
    got = logprob_gradient(state, scored(hidden)[0], count, head[targets], dh, rows=rows, cols=cols)
    for i in np.ndindex(5, cols):  # the others belong to no group
        step = np.zeros_like(hidden)
        step[i] = 1e-5
        difference = 0.25 * (scored(hidden + step)[1] - scored(hidden - step)[1]).sum() / 2e-5
        assert got[i] == pytest.approx(difference, rel=1e-6, abs=1e-10)
    assert not got[5:].any()


def test_the_device_agrees(device: Device, tmp_path: Path) -> None:
    """The loss equals that of four separate evaluations, and the gradient matches differences of the loss."""
    training_job = job(tmp_path / "a", gradient_accumulation_steps=2)
    session, run = training_job.session, training_job.run
    run.prepare_directory()
    session.allocate()
    run.place(session)
    step = next(run.stream.steps())
    batches = run.stream.groups(step)

    def measured() -> dict[str, float]:
        session.begin()
        for groups in batches:
            session.accumulate(groups)
        sums = session.totals.read_metrics(session.device, 0, run.stream.objective)
        sums["loss"] = session.totals.read_loss(session.device, 0)
        return {name: value / run.stream.units(step.samples) for name, value in sums.items()}

    metrics = measured()
    evaluator = Evaluator(session.model, session.adapters, 16)

    def logprob(row: Row, slot: int | None) -> float:
        loss, _, tokens = evaluator.loss([row], slot)
        return -loss * tokens

    margins, values = [], np.array([run.stream.prepared.value(sample) for sample in step.samples])
    with allocated(session.device, evaluator.program, evaluator.storages()) as arena:
        evaluator.build(arena)
        for sample in step.samples:
            ratios = [logprob(row, 0) - logprob(row, None) for row in run.stream.prepared.samples[sample]]
            margins.append(SCALE * (ratios[0] - ratios[1]))
    assert max(map(abs, margins)) > 0.01, "the adapter is that of the base"
    assert metrics["margin"] == pytest.approx(np.mean(margins), rel=1e-4)
    assert metrics["loss"] == pytest.approx((values * np.log1p(np.exp(-np.array(margins)))).mean(), rel=1e-5)
    assert_gradient_is_slope(session, lambda: measured()["loss"])
    session.close()


def test_it_is_trained_logged_and_resumed(device: Device, tmp_path: Path) -> None:
    """Margins grow; two steps and two more give the same bytes as four."""
    heldout = {"eval_data": str(pairs(tmp_path / "heldout.jsonl", 3, seed=1)), "learning_rate": 2e-2}
    assert_resumes_exactly(job, tmp_path, **heldout)
    lines = read_log(tmp_path / "a" / "run" / LOG)
    assert {"eval_loss", "eval_margin"} <= set(lines[0])
    assert {"loss", "margin", "grad_norm"} <= set(lines[1])
    assert lines[-1]["loss"] < lines[1]["loss"]
    assert lines[-1]["margin"] > lines[1]["margin"]


@dataclass(frozen=True)
class Weighted(Objective):
    has_labels: ClassVar[bool] = True


def test_each_tokens_row_has_a_number() -> None:
    """For an objective that is a mean over tokens and weights them by row."""
    scoring, uploads = Scoring.declare(Weighted(), 8, 2), {}
    for tensor in scoring.tensors():
        tensor.storage.buffer = tensor
    row = np.arange(4)
    groups = [Group((Segment(row, row, slot),), slot, 0.25, value) for slot, value in ((1, 3.0), (0, 0.5))]
    scoring.upload(SimpleNamespace(write=uploads.__setitem__), groups, [np.array([[3, 6]]), np.array([[0, 3]])])
    assert uploads[scoring.values].tolist() == [0.5] * 3 + [3.0] * 3 + [0.0] * 2
    assert uploads[scoring.weights].tolist() == [0.25] * 6 + [0.0] * 2
