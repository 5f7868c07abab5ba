"""Distillation: the loss against float64, its gradient, caches and live teachers, and what is refused."""

from __future__ import annotations

import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.models import full_logits, save_golden_adapter
from support.training.shared_runs import assert_close_adapters, assert_resumes_exactly
from support.training.training import assert_gradient_is_slope, golden_arguments, model_dir, random_rows

from wgpu_lora.api import evaluate, teacher_cache
from wgpu_lora.api.quantization import quantize
from wgpu_lora.cluster.worker.job_file import KINDS
from wgpu_lora.cluster.worker.job_process import EventWriter
from wgpu_lora.cluster.worker.kinds import model_jobs as kind
from wgpu_lora.errors import UserError
from wgpu_lora.events import Evaluating, Events
from wgpu_lora.formats.safetensors_checkpoint import Checkpoint
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.first_run import differences, read_tensors
from wgpu_lora.models.adapter_set import AdapterSet
from wgpu_lora.models.batch_inputs import Segment
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.ops.loss.loss import rest_gradient
from wgpu_lora.ops.loss.sparse_logits import LOWEST
from wgpu_lora.train.adapter_tasks import AdapterTask
from wgpu_lora.train.distill.teacher_cache import TeacherCache
from wgpu_lora.train.distill.teacher_logits import MIN_TAIL, TeacherRows, TopKLogits, teacher_rows
from wgpu_lora.train.job import Job
from wgpu_lora.train.objectives.kd import kd_scores
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.prepare_job import prepare_job, prepare_multi_adapter_job
from wgpu_lora.train.run.teacher_setup import cache_plans, caches_digest, live_teacher, write_caches
from wgpu_lora.train.run.training_log import LOG, read_log

VOCAB = 301


def job(directory: Path, **changes: Any) -> Job[Any]:
    directory.mkdir(exist_ok=True)
    options = {"objective": "kd", "data": str(data(directory)), "max_steps": 4, "base_dtype": "f32"}
    return prepare_job(golden_arguments(directory, "qwen2", **{**options, **changes}))


def data(directory: Path, count: int = 5) -> Path:
    return random_rows(directory / "kd.jsonl", count, VOCAB)


def frozen(tmp_path: Path) -> str:
    return str(save_golden_adapter("qwen2", tmp_path / "teacher", scale=4.0))


def cached(tmp_path: Path, name: str = "cache", **options: Any) -> str:
    """A cache of the rows, with logits as they are."""
    arguments = {"top_k": 16, "random": 8, "length": 16, "logits_dtype": "f32", "base_dtype": "f32", **options}
    model = open_model(str(model_dir("qwen2")), None, arguments.pop("base_dtype"))
    teacher_cache(
        model, str(data(tmp_path)), tmp_path / name, adapter=frozen(tmp_path), **arguments, progress_bar=False
    )
    return str(tmp_path / name)


def started(training_job: Job[Any]) -> Job[Any]:
    training_job.run.prepare_directory()
    training_job.session.allocate()
    training_job.run.place(training_job.session)
    return training_job


def measured(training_job: Job[Any]) -> dict[str, float]:
    """The loss of the first step, and its metrics."""
    session, stream = training_job.session, training_job.run.stream
    step = next(stream.steps())
    session.begin()
    for groups in stream.groups(step):
        session.accumulate(groups)
    units = stream.units(step.samples)
    metrics = stream.objective.logged(session.totals.read_metrics(session.device, 0, stream.objective), units)
    return {"loss": session.totals.read_loss(session.device, 0) / units, **metrics}


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.logaddexp.reduce(x, -1, keepdims=True)


def reference(
    student: np.ndarray,
    teacher: np.ndarray,
    targets: np.ndarray,
    top_k: int,
    temperature: float,
    kind: str,
    beta: float,
) -> dict[str, float]:
    """In float64, of whole logits [n, V]."""

    def buckets(logits: np.ndarray, order: np.ndarray) -> np.ndarray:
        sorted_ = np.take_along_axis(log_softmax(logits / temperature), order, 1)
        if top_k == sorted_.shape[1]:
            return sorted_
        return np.concatenate([sorted_[:, :top_k], np.logaddexp.reduce(sorted_[:, top_k:], 1, keepdims=True)], 1)

    order = np.argsort(-teacher, axis=1, kind="stable")
    lp, lq = buckets(teacher, order), buckets(student, order)
    p, q = np.exp(lp), np.exp(lq)
    if kind == "jsd":
        mix = np.logaddexp(lq + np.log(1 - beta), lp + np.log(beta))
        terms = beta * p * (lp - mix) + (1 - beta) * q * (lq - mix)
    else:
        terms = p * (lp - lq) if kind == "forward_kl" else q * (lq - lp)
    plain, rows = log_softmax(student), np.arange(len(targets))
    return {
        "kd_loss": terms.sum(1).mean(),
        "hard_top1_loss": -plain[rows, order[:, 0]].mean(),
        "hard_full_loss": -plain[rows, targets].mean(),
        "top1_agreement": (student.argmax(1) == order[:, 0]).mean(),
        "teacher_tail": p[:, top_k:].sum(1).mean(),
        "student_tail": q[:, top_k:].sum(1).mean(),
    }


def whole_logits(training_job: Job[Any], adapters: AdapterSet | None) -> tuple[np.ndarray, np.ndarray]:
    """Of the first step's targets, f64 [n, V], with the adapter in slot 0; and the targets."""
    stream = training_job.run.stream
    rows = [stream.prepared.samples[sample][0] for sample in next(stream.steps()).samples]
    logits_of_rows = full_logits(training_job.session.model, [Segment(row.input_ids) for row in rows], adapters)
    targets = [row.labels[1:] != -100 for row in rows]
    logits = [row_logits[:-1][at] for row_logits, at in zip(logits_of_rows, targets, strict=True)]
    ids = [row.labels[1:][at] for row, at in zip(rows, targets, strict=True)]
    return np.concatenate(logits).astype(np.float64), np.concatenate(ids)


WEIGHTS = {"hard_top1_weight": 0.5, "hard_full_weight": 0.25}
CASES = [
    {"kd_divergence": "forward_kl"},
    {"kd_divergence": "reverse_kl", **WEIGHTS},
    {"kd_divergence": "jsd", "kd_beta": 0.3, "temperature": 2.0, **WEIGHTS, "teacher_top_k": VOCAB},
    {"kd_divergence": "forward_kl", "teacher_top_k": VOCAB},
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slow] if name in ("forward", "jsd") else [])
        for name, case in zip(("forward", "reverse", "jsd", "whole"), CASES, strict=True)
    ],
)
def test_the_device_agrees(device: Device, tmp_path: Path, case: dict[str, Any]) -> None:
    """The loss is that of whole logits in float64, and its gradient matches differences of the loss."""
    options = {"teacher": str(model_dir("qwen2")), "teacher_adapter": frozen(tmp_path), "teacher_top_k": 16}
    training_job = started(job(tmp_path / "a", **{**options, **case}))
    session, args = training_job.session, training_job.run.args
    values = measured(training_job)
    student, targets = whole_logits(training_job, session.adapters)
    (group,) = session.teachers.groups
    teacher, _ = whole_logits(training_job, group.adapters)
    arguments = args.teacher_top_k, args.temperature, args.kd_divergence, args.kd_beta
    expected = reference(student, teacher, targets, *arguments)
    total = args.kd_weight * expected["kd_loss"] + args.hard_top1_weight * expected["hard_top1_loss"]
    assert expected["kd_loss"] > 1e-3, "the teacher is the student"
    for name, value in {"loss": total + args.hard_full_weight * expected["hard_full_loss"], **expected}.items():
        assert values[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
    if args.teacher_top_k == VOCAB:
        assert values["kd_loss"] == pytest.approx(expected["kd_loss"], abs=1e-6)

    assert_gradient_is_slope(session, lambda: measured(training_job)["loss"])
    assert session.memory().training == sum(session.memory().groups.values())
    session.close()


@pytest.mark.parametrize("live", [pytest.param(True, marks=pytest.mark.slow), False])
def test_resuming_gives_the_same_bytes(device: Device, tmp_path: Path, live: bool) -> None:
    """With held-out rows of the same data, at a temperature that needs random tokens; and the loss falls."""
    teacher = {"teacher": str(model_dir("qwen2")), "teacher_adapter": frozen(tmp_path), "teacher_top_k": 16}
    options = teacher if live else {"teacher_cache": cached(tmp_path)}
    options |= {"validation_split": 2, "temperature": 2.0, "lora_dropout": 0.1, "learning_rate": 5e-3}
    options["data"] = str(data(tmp_path, 8) if live else tmp_path / "kd.jsonl")
    assert_resumes_exactly(job, tmp_path, **options)
    lines = read_log(tmp_path / "a" / "run" / LOG)
    assert {"kd_loss", "top1_agreement", "teacher_tail", "student_tail", "eval_kd_loss"} <= set(lines[-1])
    assert "hard_full_loss" not in lines[-1], "it is not known at this temperature"
    assert lines[-1]["eval_loss"] < lines[0]["eval_loss"]


def test_resuming_needs_the_same_teacher(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it differs in values that its quick digest does not cover; and a damaged one is named."""
    teacher = tmp_path / "teacher"
    shutil.copytree(model_dir("qwen2"), teacher)
    monkeypatch.setattr(Checkpoint, "digest", lambda self: "the same")
    options = {"teacher": str(teacher), "teacher_top_k": 4}
    job(tmp_path / "a", **options, max_steps=1).train()
    path = teacher / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("norm.weight"))
    for value, message in (
        (2.0, "The teacher of the run in .* has changed"),
        (np.nan, f"In the teacher .*, {name} holds"),
    ):
        tensors[name][0] = value
        save_file(tensors, path)
        with pytest.raises(UserError, match=message):
            job(tmp_path / "a", **options, resume=True).train()


@pytest.mark.slow
def test_beside_other_adapters(device: Device, tmp_path: Path) -> None:
    """In one pipeline with shared batches, each adapter is as when trained alone: two teachers that keep different
    tokens, at temperatures of their own, and plain fine-tuning."""
    live = {"teacher": str(model_dir("qwen2")), "teacher_adapter": frozen(tmp_path), "teacher_top_k": 9}
    own: dict[str, dict[str, Any]] = {
        "a": {"objective": "kd", "teacher_cache": cached(tmp_path), "temperature": 2.0, "hard_full_weight": 0.5},
        "b": {"objective": "kd", **live, "kd_divergence": "reverse_kl"},
        "c": {"objective": "sft"},
    }
    rows = str(tmp_path / "kd.jsonl")
    for name, options in own.items():
        job(tmp_path / name, **options, data=rows, max_steps=2).train()
    initial = str(tmp_path / "a" / "initial")
    tasks = [
        AdapterTask(rows, str(tmp_path / f"together-{name}"), name, options={**options, "init_adapter": initial})
        for name, options in own.items()
    ]
    shared = golden_arguments(tmp_path, "qwen2", max_steps=2, base_dtype="f32", data=None, init_adapter=None)
    prepare_multi_adapter_job(shared, tasks).train()
    for name in own:
        assert_close_adapters(tmp_path / f"together-{name}", tmp_path / name / "run", 1e-5)


def test_tails_are_as_long_as_batches(device: Device, tmp_path: Path) -> None:
    """Also where its rows do not fill tensors to their alignment: the reference of what reads them takes their sizes,
    as it must where a device checks this kernel in a first run."""
    session = started(job(tmp_path / "a", teacher=str(model_dir("qwen2")), teacher_top_k=4)).session
    [batch] = [batch for batch in session.steps.values() if batch.tokens == 16]
    batch.program.build(session.arena, session.choices)
    steps = [step for step in batch.program.dispatches if step.kernel is rest_gradient]
    for step in steps:
        values = read_tensors(device, step.present, step.tensors)
        assert len(list(differences(step.kernel, step.constants, values, values))) == 1
    assert steps
    session.close()


def test_it_is_evaluated(device: Device, tmp_path: Path) -> None:
    """By the teacher of the training or by another; by default as after supervised fine-tuning."""
    live = {"teacher": str(model_dir("qwen2")), "teacher_adapter": frozen(tmp_path)}
    settings = {"validation_split": 2, "teacher_top_k": 16, "hard_full_weight": 0.5, "max_steps": 1}
    training_job = job(tmp_path / "a", **live, **settings)
    training_job.train()
    arguments: dict[str, Any] = {
        "adapter": tmp_path / "a" / "run",
        "run_log": False,
        "data": str(training_job.run.args.data),
    }
    model = open_model(str(model_dir("qwen2")), device, "f32")
    result = evaluate(model, **arguments, objective="kd")
    again = evaluate(model, **arguments, teacher_cache=cached(tmp_path))
    plain = evaluate(model, **arguments)
    assert (result.objective, again.objective, plain.objective) == ("kd", "kd", "sft")
    assert result.metrics["hard_full_loss"] == pytest.approx(plain.loss, rel=1e-5)
    assert result.loss == pytest.approx(result.metrics["kd_loss"] + 0.5 * plain.loss, rel=1e-5)
    assert again.metrics["kd_loss"] == pytest.approx(result.metrics["kd_loss"], rel=1e-5)
    with pytest.raises(UserError, match="is for objective='kd', not dpo"):
        evaluate(model, **arguments, objective="dpo", teacher="demo")


def test_the_rest_at_another_temperature() -> None:
    """Of all tokens it is exact, of some about right; at temperature 1 it is known."""
    rng = np.random.default_rng(0)
    logits, top_k, random = 2 * rng.standard_normal((400, 500)), 20, 100
    order = np.argsort(-logits, axis=1)
    lse = np.logaddexp.reduce(logits, 1).astype(np.float32)

    def supported(count: int) -> TopKLogits:
        samples = np.stack([top_k + rng.permutation(480)[:count] for _ in logits]) if count else np.zeros((400, 0), int)
        ids = np.take_along_axis(order, np.hstack([np.tile(np.arange(top_k), (400, 1)), samples]), 1)
        correction = np.full(400, np.log(480 / count) if count else 0, np.float32)
        return TopKLogits(ids, np.take_along_axis(logits, ids, 1), lse, top_k, correction)

    targets = order[:, 30]
    for temperature in (0.7, 2.0):
        exact = np.sort(log_softmax(logits / temperature), axis=1)[:, ::-1]
        tail = np.logaddexp.reduce(exact[:, top_k:], 1)
        rows = teacher_rows(supported(480), targets, 500, temperature)
        np.testing.assert_allclose(rows.logprobs[:, :top_k], exact[:, :top_k], atol=2e-6)
        np.testing.assert_allclose(rows.logprobs[:, top_k], tail, atol=2e-6)
        estimated = teacher_rows(supported(random), targets, 500, temperature).logprobs[:, top_k]
        assert np.mean(np.exp(estimated)) == pytest.approx(np.mean(np.exp(tail)), rel=0.02)
    exact_rows = teacher_rows(supported(0), targets, 500)
    np.testing.assert_allclose(np.exp(exact_rows.logprobs.astype(float)).sum(1), 1, atol=1e-5)
    assert (exact_rows.target_columns == top_k).all()
    assert (exact_rows.ids[:, top_k] == targets).all()


def test_the_rest_is_never_nothing() -> None:
    """A teacher that is sure, whose log-probabilities are rounded up."""
    support = TopKLogits(
        np.array([[3, 1]], np.uint32), np.array([[5.001, -40]]), np.array([5.0]), 2, np.zeros(1, np.float32)
    )
    rows = teacher_rows(support, np.array([1]), 10)
    assert np.exp(rows.logprobs.astype(float)).sum() == pytest.approx(1)
    assert np.exp(float(rows.logprobs[0, 2])) == pytest.approx(MIN_TAIL)
    assert rows.target_columns.tolist() == [1]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, r"objective='kd' needs a teacher: give either teacher or teacher_cache\."),
    "both": ({"teacher": "demo", "teacher_cache": "c"}, r"needs one teacher: give either teacher or teacher_cache\."),
    "weights": ({"teacher": "demo", "kd_weight": 0.0}, "are all 0, so there is nothing to train on"),
    "vocabulary": ({"teacher": "demo"}, r"The teacher demo has a vocabulary of [\d,]+ tokens, but .* one of 301"),
    "top_k": (
        {"teacher": "SAME", "teacher_top_k": 302},
        r"teacher_top_k=302 is more than the teacher's vocabulary of 301",
    ),
    "no cache": ({"teacher_cache": "nowhere"}, "nowhere is not a teacher cache"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(device: Device, tmp_path: Path, name: str) -> None:
    options, words = WRONG[name]
    arguments = {key: str(model_dir("qwen2")) if value == "SAME" else value for key, value in options.items()}
    with pytest.raises(UserError, match=words):
        job(tmp_path, **arguments)
    assert not (tmp_path / "run").exists()


def test_a_teacher_is_not_as_rounded_as_its_student(device: Device, tmp_path: Path) -> None:
    """Unless it is asked for, or stored that way."""
    base = str(model_dir("qwen2"))
    stored = tmp_path / "stored"
    quantize(base, "int8-row", stored, device=device)

    def formats(student: str, teacher: str, **changes: Any) -> tuple[str, str]:
        args = TrainingArguments(objective="kd", model=student, teacher=teacher, max_length=16, **changes)
        opened = open_model(student, device, args.base_dtype)
        live = live_teacher(args, opened)
        return opened.decoder.base_dtype, live.model.decoder.base_dtype

    own, there = open_model(str(stored), device).decoder.base_dtype, str(stored)
    for student, teacher, changes, expected in (
        (base, base, {"base_dtype": "f32"}, ("f32", "f32")),
        (base, there, {"base_dtype": "f32"}, ("f32", own)),
        (there, base, {}, (own, "nf4")),
        (there, base, {"teacher_base_dtype": "f32"}, (own, "f32")),
        (base, base, {"base_dtype": "lut2-row", "train": "quant-scales"}, ("lut2-row", "nf4")),
    ):
        assert formats(student, teacher, **changes) == expected
    with pytest.raises(UserError, match="teacher_base_dtype='f32' is not possible"):
        formats(base, str(stored), teacher_base_dtype="f32")


def test_caches_that_do_not_fit(device: Device, tmp_path: Path) -> None:
    cache = cached(tmp_path, random=0)
    arguments = {"teacher_cache": cache, "data": str(tmp_path / "kd.jsonl")}
    more = str(random_rows(tmp_path / "more.jsonl", 6, VOCAB))
    other = str(random_rows(tmp_path / "other.jsonl", 5, VOCAB, seed=1))
    for changes, words in (
        ({"temperature": 2.0}, r"has no random tokens, which temperature=2\.0 needs"),
        ({"data": more}, r"is shorter than the data: it has 5 rows, and 1 row of 6 is missing"),
        ({"eval_data": more}, r"held-out rows .* need a teacher cache of their own: give eval_teacher_cache"),
        ({"data": other}, "was made of other data"),
    ):
        with pytest.raises(UserError, match=words):
            job(tmp_path / "a", **arguments | changes)


# -- the float64 reference of distillation's kernel --------------------------------------------------------------------

POSITIONS, TOKENS = 6, 13


def sparse_rows(logits: np.ndarray, top_k: int, temperature: float, targets: np.ndarray) -> TeacherRows:
    """What a teacher with these logits says, who keeps all others as random tokens."""
    ids = np.argsort(-logits, axis=1, kind="stable").astype(np.uint32)
    lse = np.logaddexp.reduce(logits, 1)
    support = TopKLogits(ids, np.take_along_axis(logits, ids.astype(int), 1), lse, top_k, np.zeros(len(lse)))
    rows = teacher_rows(support, targets, logits.shape[1], temperature)
    return TeacherRows(rows.ids, rows.logprobs.astype(np.float64), rows.target_columns)


def scored(
    logits: np.ndarray, rows: TeacherRows, weights: np.ndarray, temperature: float, **constants: Any
) -> tuple[np.ndarray, np.ndarray]:
    """(the loss of each row, its derivatives by all logits), as the pass computes them."""
    top_k = rows.ids.shape[1] - 1
    used = np.arange(top_k + 1) < top_k + (rows.target_columns == top_k)[:, None]
    ids = np.where(used, rows.ids, 0).astype(int)
    tail_logits = logits.copy()
    for r in range(len(logits)):
        tail_logits[r, ids[r][used[r]]] = -np.inf
    empty = np.isinf(tail_logits).all(1)

    def state(by: float) -> np.ndarray:
        top = np.where(empty, LOWEST, tail_logits.max(1))
        total = np.exp(by * (tail_logits - top[:, None])).sum(1)
        return np.stack([top, total, 0 * top, 0 * top], 1)

    def shares(by: float) -> np.ndarray:
        top, total = state(by)[:, :2].T
        return np.exp(by * (tail_logits - top[:, None])) / np.where(empty, 1, total)[:, None]

    plain_state = temperature != 1 and bool(constants.get("top1") or constants.get("full"))
    slopes, values = kd_scores(
        np.take_along_axis(logits, ids, 1), rows.logprobs, rows.target_columns, weights,
        state(1 / temperature), None, None,
        state(1.0) if plain_state else None, rows=len(logits), kept=top_k, stride=64, rate=1 / temperature,
        **{"kd": 1.0, "top1": 0.0, "full": 0.0, "forward": False, "reverse": False, "beta": 0.5} | constants,
    )  # fmt: skip
    gradient = values[0, : len(logits), None] * shares(1 / temperature)
    gradient = gradient + (values[1, : len(logits), None] * shares(1.0) if plain_state else 0)
    for r in range(len(logits)):
        np.add.at(gradient[r], ids[r][used[r]], slopes[r][used[r]])
    return values[2, : len(logits)], gradient


@pytest.mark.parametrize("top_k", [4, TOKENS - 1, TOKENS])
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
def test_gradients_are_those_of_the_loss(top_k: int, temperature: float, constants: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    logits, teacher = 2 * rng.standard_normal((2, POSITIONS, TOKENS))
    targets, weights = rng.integers(0, TOKENS, POSITIONS), rng.random(POSITIONS) + 0.5
    rows = sparse_rows(teacher, top_k, temperature, targets)
    _, gradient = scored(logits, rows, weights, temperature, **constants)
    for v in range(TOKENS):
        step = np.zeros_like(logits)
        step[:, v] = 1e-5
        up, down = (scored(logits + s * step, rows, weights, temperature, **constants)[0] for s in (1, -1))
        np.testing.assert_allclose(gradient[:, v], weights * (up - down) / 2e-5, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("gap", [30.0, 300.0])
def test_a_student_that_is_sure(gap: float) -> None:
    """The bucket's share is e^-gap, which 1 minus the others would not tell from 0."""
    logits, teacher = np.zeros((1, TOKENS)), np.zeros((1, TOKENS))
    logits[0, 0], teacher[0, 0] = gap, 3.0
    rows = sparse_rows(teacher, 1, 1.0, np.array([0]))
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
    student, teacher = 2 * rng.standard_normal((2, POSITIONS, TOKENS))
    x = torch.tensor(student, requires_grad=True)
    lq, lp = (torch.log_softmax(logits / temperature, -1) for logits in (x, torch.tensor(teacher)))
    if beta in (0.0, 1.0):
        terms = (
            kl_div(lq, lp, reduction="none", log_target=True)
            if beta == 0
            else kl_div(lp, lq, reduction="none", log_target=True)
        )
    else:
        share = torch.tensor(beta, dtype=torch.float64)
        mix = torch.logsumexp(torch.stack([lq + torch.log1p(-share), lp + torch.log(share)]), 0)
        of_teacher, of_student = (kl_div(mix, own, reduction="none", log_target=True) for own in (lp, lq))
        terms = beta * of_teacher + (1 - beta) * of_student
    terms.sum().backward()
    rows = sparse_rows(teacher, TOKENS, temperature, np.zeros(POSITIONS, int))
    flags = {"forward": beta == 0, "reverse": beta == 1, "beta": beta}
    losses, gradient = scored(student, rows, np.ones(POSITIONS), temperature, **flags)
    np.testing.assert_allclose(losses, terms.sum(-1).detach().numpy(), rtol=1e-6)
    np.testing.assert_allclose(gradient, x.grad.numpy(), rtol=1e-5, atol=1e-7)


# -- caches that replace the live teacher of a run ---------------------------------------------------------------------

LIVE = ("teacher", "teacher_adapter", "teacher_base_dtype", "teacher_top_k")


class Rows(Events):
    def __init__(self) -> None:
        self.counts: list[tuple[int, int]] = []

    def evaluating(self, evaluating: Evaluating) -> None:
        self.counts.append((evaluating.rows, evaluating.total))


def options(tmp_path: Path, **changes: Any) -> TrainingArguments:
    """A run with a live teacher, which is the student with an adapter."""
    defaults = {
        "objective": "kd",
        "data": str(random_rows(tmp_path / "rows.jsonl", 6, VOCAB)),
        "teacher": str(model_dir("qwen2")),
        "teacher_adapter": str(save_golden_adapter("qwen2", tmp_path / "teacher", scale=4.0)),
        "teacher_base_dtype": "f32",
        "teacher_top_k": 16,
        "max_steps": 3,
        "eval_steps": 1,
        "logging_steps": 1,
        "base_dtype": "nf4",
    }
    return golden_arguments(tmp_path, "qwen2", **{**defaults, **changes})


def with_caches(args: TrainingArguments, output: Path, events: Events | None = None) -> TrainingArguments:
    """The options of a run with caches instead of the teacher."""
    job = prepare_job(args, planning=True)
    places = write_caches(job.run, job.session.model, output, events or Rows())
    bare = dict.fromkeys(LIVE[:3]) | {"teacher_top_k": TrainingArguments.teacher_top_k}
    return replace(args, **bare, **places, output=str(output / "run"))


@pytest.mark.parametrize(("heldout", "temperature"), [("validation_split", 1.0), ("eval_data", 2.0)])
def test_losses_are_those_of_the_live_teacher(tmp_path: Path, heldout: str, temperature: float) -> None:
    heldout_data = 2 if heldout == "validation_split" else str(random_rows(tmp_path / "held.jsonl", 3, VOCAB))
    args = options(tmp_path, temperature=temperature, **{heldout: heldout_data})
    cached = with_caches(args, tmp_path / "caches")
    assert bool(cached.eval_teacher_cache) == (heldout == "eval_data")
    logs = []
    for run_args in (replace(args, output=str(tmp_path / "live")), cached):
        prepare_job(run_args).train()
        logs.append(
            [{k: v for k, v in line.items() if "loss" in k} for line in read_log(Path(run_args.directory) / LOG)]
        )
    live, ours = logs
    assert any("eval_kd_loss" in line for line in live)
    assert max(line.get("kd_loss", 0.0) for line in live) > 0.01
    for entry, other in zip(live, ours, strict=True):
        assert other == pytest.approx(entry, rel=1e-4)


def test_caches_are_continued_and_count_their_rows_together(tmp_path: Path) -> None:
    counter, again = Rows(), Rows()
    args = options(tmp_path, eval_data=str(random_rows(tmp_path / "held.jsonl", 3, VOCAB)))
    first = with_caches(args, tmp_path / "caches", counter)
    total = sum(TeacherCache.open(getattr(first, name) or "").rows for name in ("teacher_cache", "eval_teacher_cache"))
    assert (counter.counts[0], counter.counts[-1]) == ((0, total), (total, total))
    assert [rows for rows, _ in counter.counts] == sorted(rows for rows, _ in counter.counts)
    digest = TeacherCache.open(first.teacher_cache or "").digest()
    assert with_caches(args, tmp_path / "caches", again) == first
    assert again.counts == []
    assert TeacherCache.open(first.teacher_cache or "").digest() == digest
    cached = prepare_job(first, planning=True)
    with pytest.raises(UserError, match="has no teacher that could be cached"):
        cache_plans(cached.run, cached.session.model)


def test_runs_that_the_same_caches_serve(tmp_path: Path) -> None:
    def digest(**changes: Any) -> str:
        job = prepare_job(options(tmp_path, validation_split=2, **changes), planning=True)
        return caches_digest(job.run, cache_plans(job.run, job.session.model))

    first = digest()
    assert digest(seed=7, learning_rate=1e-3) == first  # another split of the same rows
    variants = [digest(teacher_top_k=8), digest(teacher_adapter=None), digest(temperature=2.0), digest(max_length=12)]
    assert len({first, *variants}) == 5
    assert digest(temperature=2.0, seed=7) != digest(temperature=2.0)  # which tokens are drawn


def test_the_plan_with_caches_is_that_of_a_run_with_them(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "Device", lambda selector=None: device)
    args = options(tmp_path, validation_split=2)
    arguments = {name: value for name, value in args.as_dict().items() if value != getattr(TrainingArguments(), name)}
    arguments = {name: value for name, value in arguments.items() if name not in ("output", "device")}
    tasks = [
        {"name": "taught", "options": arguments},
        {"name": "again", "options": {**arguments, "learning_rate": 0.5}},
    ]
    plan = KINDS["plan"](EventWriter(io.StringIO()), where="it", tasks=tasks, cached=True)
    cached = prepare_job(with_caches(args, tmp_path / "caches"), planning=True)
    needs = plan["taught"]["taught"]["needs"]
    assert needs["needed"] == cached.session.memory().peak_device_bytes < plan["tasks"]["taught"]["needed"]
    assert plan["taught"]["again"] == plan["taught"]["taught"]
    assert KINDS["plan"](EventWriter(io.StringIO()), where="it", tasks=tasks)["taught"] == {}
