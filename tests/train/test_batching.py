"""Default batches and row lengths, learning rates, and samples that share rows of a batch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cli import QWEN2, SMALL, Run, flags, write_rows
from support.training.training import golden_arguments

import wgpu_lora
from wgpu_lora.bench.training_runs import Work, prepared
from wgpu_lora.data.tokenized_data import Row, common_prefix
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.batch_inputs import Segment
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.train.job import Job
from wgpu_lora.train.lr_schedule import LR_SCHEDULES, learning_rate, warmup_steps
from wgpu_lora.train.objectives.objective import Group
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.options.unused_options import unused_options
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.run.trained_options import evaluation_rows
from wgpu_lora.train.training_data import FEW, default_batches

# Rows, the tokens of each, the adapter's weight and what was given -> packing, rows per batch, batches per step, and
# whether there is a note.
DEFAULTS: list[tuple[int, int, float, dict[str, Any], tuple[bool, int, int, bool]]] = [
    (296, 100, 1, {}, (False, 8, 1, True)),  # small data have small steps
    (200, 100, 1, {}, (False, 4, 1, True)),
    (50, 100, 1, {}, (False, 2, 1, True)),
    (1, 100, 1, {}, (False, 1, 1, True)),  # there is no second row
    (FEW * 2 * 1024 * 4 // 100 + 1, 100, 1, {}, (True, 2, 4, False)),
    (296, 1000, 1, {}, (True, 2, 4, False)),  # between them there are fewer packed batches a step
    (200, 1000, 1, {}, (True, 2, 2, True)),
    (100, 1000, 1, {}, (True, 2, 1, True)),
    (60, 1000, 1, {}, (False, 2, 1, True)),
    (50, 100, 1, {"packing": True}, (True, 2, 1, True)),  # what was given holds
    (50, 100, 1, {"packing": True, "gradient_accumulation_steps": 4}, (True, 2, 4, False)),
    (50, 100, 1, {"per_device_train_batch_size": 4}, (False, 4, 1, True)),
    (50, 100, 1, {"gradient_accumulation_steps": 4}, (False, 1, 4, True)),
    (50, 100, 1, {"packing": False, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 3},
     (False, 16, 3, False)),
    (50, 100, 1, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}, (False, 2, 8, True)),
    (50, 100, 2, {}, (False, 2, 2, True)),  # a weight multiplies what was left open
    (50, 100, 0.5, {}, (False, 1, 1, True)),
    (100_000, 100, 2, {}, (True, 2, 8, False)),
    (200, 1000, 0.5, {}, (True, 2, 1, True)),
    (200, 1000, 2, {}, (True, 2, 4, True)),
    (50, 100, 2, {"gradient_accumulation_steps": 6}, (False, 1, 6, True)),  # multiplied already
]  # fmt: skip


@pytest.mark.parametrize(("rows", "tokens", "weight", "options", "expected"), DEFAULTS)
def test_default_batches(rows: int, tokens: int, weight: float, options: dict[str, Any], expected: object) -> None:
    args, note = default_batches(TrainingArguments(**options), [tokens] * rows, weight)
    assert (*args.batching, bool(note)) == expected
    assert (args.packing, args.per_device_train_batch_size, args.gradient_accumulation_steps) == args.batching


def test_a_batch_is_no_longer_than_a_packed_one() -> None:
    args, _ = default_batches(TrainingArguments(), [60] * 280 + [1000] * 8)
    assert args.batching == (False, 2, 4)


@pytest.mark.parametrize(
    ("rows", "weight", "options", "note"),
    [(1, 1, {}, "1 row"), (3, 1, {}, "2 rows"), (50, 2, {}, "4 rows"), (50, 0.5, {}, "1 row"),
     (3, 1, {"per_device_train_batch_size": 16}, "3 rows")],
)  # fmt: skip
def test_the_note_counts_the_rows_of_a_step(rows: int, weight: float, options: dict[str, Any], note: str) -> None:
    assert default_batches(TrainingArguments(**options), [100] * rows, weight)[1].startswith(f"{note} per step")


@pytest.mark.parametrize("kind", LR_SCHEDULES)
@pytest.mark.parametrize(("total", "ratio"), [(1, 0.03), (1, 1.0), (2, 1.0), (12, 0.5), (12, 1.0), (100, 0.03)])
def test_every_step_trains_and_the_peak_is_reached(kind: str, total: int, ratio: float) -> None:
    warmup = warmup_steps(total, ratio)
    rates = [learning_rate(kind, 1e-3, step, total, warmup) for step in range(total)]
    assert min(rates) > 0
    assert max(rates) == pytest.approx(1e-3)


@pytest.mark.parametrize("kind", LR_SCHEDULES)
def test_decays_end_at_the_least_rate(kind: str) -> None:
    """min + (peak - min) * decay: transformers' `cosine_with_min_lr`, for every schedule that decays."""
    total, warmup, peak, least = 40, 4, 5e-5, 1e-5
    plain, floored = (
        [learning_rate(kind, peak, step, total, warmup, to) for step in range(total + 1)] for to in (0.0, least)
    )
    assert floored[:warmup] == plain[:warmup]
    falls = LR_SCHEDULES[kind].decay is not None
    assert floored[total] == (pytest.approx(least, rel=1e-12) if falls else peak)
    expected = [least + (peak - least) * rate / peak if falls else rate for rate in plain[warmup:]]
    assert floored[warmup:] == pytest.approx(expected, rel=1e-12)


def test_a_least_rate_above_the_peak_is_refused_and_idle_without_decay() -> None:
    with pytest.raises(UserError, match="more than the peak"):
        TrainingArguments(learning_rate=1e-5, lr_scheduler_min=2e-5)
    constant = TrainingArguments(lr_scheduler_type="constant", lr_scheduler_min=1e-5)
    assert any("does not decay" in line for line in unused_options(["lr_scheduler_min"], constant))
    assert not unused_options(["lr_scheduler_min"], TrainingArguments(lr_scheduler_min=1e-5))


def test_a_warmup_that_is_said_in_steps() -> None:
    assert (warmup_steps(100, 0.03, 20), warmup_steps(10, 0.03, 20)) == (20, 9)


# -- default row lengths -----------------------------------------------------------------------------------------------

POSITIONS = 128  # of the models among the fixtures


def test_a_length_that_nobody_gave(run: Run, tmp_path: Path) -> None:
    """It fits the model, also in the record and in resumed runs; an adapter is evaluated as it was trained."""
    data, out = write_rows(tmp_path / "rows.jsonl"), tmp_path / "out"
    small = {name: value for name, value in SMALL.items() if name != "max_length"} | {"tune": False}
    output = run("finetune", *flags(**small, model=QWEN2, data=data, output=out, eval_steps=1)).output()
    assert f"length    rows of at most {POSITIONS} tokens, the number of positions of this model" in output
    assert (
        "note      --eval-steps 1 does nothing, since no rows are held out (use --eval-data or --validation-split)"
        in output
    )
    options = json.loads((out / "run.json").read_text())["options"]
    assert (options["max_length"], options["warmup_steps"]) == (POSITIONS, 0)
    assert run("finetune", "--output", out, "--resume", "--max-steps", 3)[0] == 0
    assert (
        f"--max-length was {POSITIONS}, not 64"
        in run("finetune", "--output", out, "--resume", "--max-steps", 4, "--max-length", 64).refusal()
    )
    options |= {"max_length": 8, "on_overflow": "drop"}
    (out / "run.json").write_text(json.dumps({"options": options}))
    output = run("evaluate", "--model", QWEN2, "--data", data, "--adapter", out)[1]
    assert "note      --max-length 8, --on-overflow drop, as in training" in output
    model = wgpu_lora.load(QWEN2)
    assert wgpu_lora.evaluate(model, data, adapter=out, on_overflow="truncate").rows == 8
    assert wgpu_lora.evaluate(model, data).max_length == POSITIONS
    with pytest.raises(UserError, match=rf"^max_length=129 is more than this model's {POSITIONS} positions"):
        wgpu_lora.evaluate(model, data, max_length=POSITIONS + 1)


def test_a_pipeline_and_a_benchmark_fit_their_model(device: Device, tmp_path: Path) -> None:
    model = wgpu_lora.load(QWEN2)
    data = write_rows(tmp_path / "rows.jsonl")
    tasks = [{"data": data, "checkpoint": tmp_path / name} for name in "ab"]
    job = wgpu_lora.MultiAdapterPipeline(tasks, model, max_iters=1).job
    assert {run.args.max_length for run in job.runs} == {job.shared.args.max_length} == {POSITIONS}
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'model = "{QWEN2}"\ndata = "{data}"\noutput = "{tmp_path / "out"}"\n')
    assert prepare_job(*prepared(Work(str(recipe)), tmp_path, device)).run.args.max_length == POSITIONS


@pytest.mark.parametrize("on_overflow", ["truncate", "drop"])
def test_a_plan_of_shorter_rows_is_that_of_the_run(tmp_path: Path, on_overflow: str) -> None:
    """The advice about a smaller --max-length is exact to the byte."""
    data, model = write_rows(tmp_path / "rows.jsonl"), wgpu_lora.load(QWEN2)
    args = TrainingArguments(model=QWEN2, data=str(data), eval_data=str(data), on_overflow=on_overflow, lora_r=2)
    least = {"per_device_train_batch_size": 1, "max_length": 8}
    planned = prepare_job(args, model, planning=True).replan(least)
    assert planned == prepare_job(replace(args, **least), model, planning=True).session.memory().peak
    with pytest.raises(UserError, match=r"^max_length=2 leaves no row"):
        prepare_job(replace(args, on_overflow="drop"), model, planning=True).replan({"max_length": 2})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, 1024),
        ({"max_length": 100}, 100),
        ({"max_length": 4096}, 1024),
        ({"max_length": True}, 1024),
        ({"max_length": -5}, 1024),
        ({"max_length": "8"}, 1024),
        ("[]", 1024),
        ("{", 1024),
    ],
    ids=str,
)
def test_an_adapters_record_is_not_taken_on_trust(tmp_path: Path, options: Any, expected: int) -> None:
    if options is not None:
        text = options if isinstance(options, str) else json.dumps({"options": options})
        (tmp_path / "run.json").write_text(text)
    assert evaluation_rows({}, [tmp_path], 2048).max_length == expected
    assert evaluation_rows({}, [tmp_path], 100).note.startswith("rows of at most 100 tokens" if expected > 100 else "")


def test_adapters_that_are_measured_together_share_their_rows(tmp_path: Path) -> None:
    for name, options in (
        ("a", {"max_length": 64, "completion_only_loss": False, "on_overflow": "drop"}),
        ("b", {"max_length": 256, "completion_only_loss": False, "on_overflow": "truncate"}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metadata.json").write_text(json.dumps({"options": options}))  # as checkpoints have it
    rows = evaluation_rows({}, [tmp_path / "a", tmp_path / "b"], 2048)
    assert (rows.max_length, rows.completion_only_loss, rows.on_overflow) == (256, False, "truncate")
    assert rows.note == "max_length=256, completion_only_loss=False, as in training"
    assert evaluation_rows({"max_length": 32}, [tmp_path / "a"], 2048).max_length == 32
    assert evaluation_rows({}, [tmp_path / "a", tmp_path / "c"], 2048).max_length == 1024  # one says nothing


# -- samples that share their prompt's rows ----------------------------------------------------------------------------


def pair(rng: np.random.Generator, common: int, *own: int) -> list[Segment]:
    prompt = rng.integers(0, 250, common)
    rows = [np.concatenate([prompt, rng.integers(0, 250, size)]) for size in own]
    labels = [np.where(np.arange(len(row)) <= common, -100, row) for row in rows]
    return [Segment(row, label) for row, label in zip(rows, labels, strict=True)]


def forked(segments: list[Segment], prefix: int) -> list[Segment]:
    return [segments[0], replace(segments[1], prefix=prefix)]


@pytest.fixture
def job(device: Device, tmp_path: Path, request: pytest.FixtureRequest) -> Job:
    args = golden_arguments(tmp_path, getattr(request, "param", "llama"), base_dtype="f32")
    return prepare_job(args, open_model(args.model, device, "f32"))


@pytest.mark.drivers
@pytest.mark.parametrize("job", ["qwen2", "llama"], indirect=True)
def test_a_fork_gives_the_gradients_of_rows_apart(job: Job, device: Device) -> None:
    rng = np.random.default_rng(0)
    first, alone, second = pair(rng, 5, 3, 2), pair(rng, 2, 3)[0], pair(rng, 1, 2, 4)
    apart = [*first, alone, *second]
    together = [*forked(first, 5), alone, *forked(second, 1)]
    assert sum(s.tokens for s in together) == sum(s.tokens for s in apart) - 6
    session = job.session
    session.allocate()
    job.run.place_initial(session)
    results = []
    for segments in (apart, together):
        session.begin()
        session.accumulate([Group(tuple(segments), weight=0.1)])
        grads = session.adapters.read(device, 0, session.adapters.grads)
        results.append(
            (session.totals.read_loss(device, 0), {k: [m.copy() for m in pair] for k, pair in grads.items()})
        )
        assert session.optimizer.finite(device, 0)  # zeroes the gradients
    session.close()
    (loss, expected), (other, got) = results
    assert other == pytest.approx(loss, rel=1e-6)
    for name, matrices in expected.items():
        for a, b in zip(matrices, got[name], strict=True):
            np.testing.assert_allclose(b, a, rtol=2e-4, atol=2e-6 * np.abs(a).max())


def test_the_common_prefix_ends_before_what_differs_or_is_trained() -> None:
    ids = np.arange(8)
    for rows, longest, expected in (  # by the row that is the first to differ, and the first that is trained
        ([(8, 5), (6, 6)], None, 4),  # row 4 predicts the trained token 5
        ([(8, 8), (3, 8)], None, 3),
        ([(8, 8), (8, 8)], None, 7),  # the second row keeps one of its own
        ([(0, 8), (8, 8)], None, 0),
        ([(8, 5)], None, 0),
        ([(8, 5), (6, 6)], 7, 0),
    ):
        samples = [Row(np.where(ids < changed, ids, 99), np.where(ids < at, -100, ids), 0) for changed, at in rows]
        assert common_prefix(samples, **({} if longest is None else {"longest": longest})) == expected


def test_models_with_windows_share_only_what_windows_hold(job: Job, device: Device, tmp_path: Path) -> None:
    assert job.session.model.config.longest_fork() is None
    windowed = open_model(golden_arguments(tmp_path, "mistral").model, device, "f32").config
    assert windowed.longest_fork() == min(w for w in windowed.sliding_windows if w)  # type: ignore[attr-defined]
