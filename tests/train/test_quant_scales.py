"""--train quant-scales: gradients, snapping to f16, resuming, what is written, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.events import hearing
from support.training.training import model_dir, random_rows

from wgpu_lora import evaluate
from wgpu_lora.cli.run_summary import describe
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.quant_constants import QuantConstants
from wgpu_lora.train.adapter_tasks import AdapterTask
from wgpu_lora.train.job import Job
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.prepare_job import prepare_job, prepare_multi_adapter_job
from wgpu_lora.train.session.session import Session

VOCAB = 100


def options(tmp_path: Path, **changes: Any) -> TrainingArguments:
    rows, heldout = tmp_path / "rows.jsonl", tmp_path / "heldout.jsonl"
    if not rows.exists():
        random_rows(rows, 8, VOCAB)
        random_rows(heldout, 4, VOCAB, seed=0)
    defaults: dict[str, Any] = {
        "model": str(model_dir("qwen3")),
        "data": str(rows),
        "eval_data": str(heldout),
        "output": str(tmp_path / "run"),
        "base_dtype": "q2a4-g16",
        "train": "quant-scales",
        "learning_rate": 3e-3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_length": 16,
        "packing": False,
        "max_steps": 6,
        "save_steps": 2,
        "eval_steps": 2,
        "logging_steps": 1,
        "tune": False,
        "run_log": False,
    }
    return TrainingArguments(**(defaults | changes))


def job(tmp_path: Path, **changes: Any) -> Job[Any]:
    return prepare_job(options(tmp_path, **changes))


def loss_and_gradient(session: Session, run: Any) -> tuple[float, list[np.ndarray]]:
    """Of the first step's rows; the gradients are left as they are."""
    device = session.device
    for page in session.trained.grads:
        device.write(page.storage.buffer, np.zeros(page.size, np.float32))
    session.begin()
    step = next(iter(run.stream.steps(0, 0)))
    for groups in run.stream.groups(step, 0):
        session.accumulate(groups)
    grads = [device.read(page.storage.buffer).view(np.float32).copy() for page in session.trained.grads]
    return session.totals.read_loss(device, 0) / run.stream.units(step.samples), grads


@pytest.mark.parametrize("base", ["q2a4-g16", "lut3-row"])
def test_gradients_through_the_model(device: Device, tmp_path: Path, base: str) -> None:
    """The derivative in a random direction is that of finite differences, for tables and scales of all matrices."""
    run = job(tmp_path, base_dtype=base, gradient_checkpointing=base == "lut3-row")
    session, trained = run.session, run.session.trained
    assert isinstance(trained, QuantConstants)
    session.allocate()
    try:
        run.run.trainable.place_initial(session, 0)
        begins = trained.read(session.device)
        assert {name.rpartition(".")[2] for name in begins} == {"constants"}
        rng = np.random.default_rng(0)
        direction = {n: rng.standard_normal(v.shape).astype(np.float32) * np.abs(v).mean() for n, v in begins.items()}
        loss, grads = loss_and_gradient(session, run.run)
        slope = sum((trained.names[n].cropped(grads[trained.names[n].page]) * d).sum() for n, d in direction.items())
        losses = []
        for step in (-4e-3, 4e-3):
            trained.write(session.device, {n: begins[n] + np.float32(step) * d for n, d in direction.items()})
            losses.append(loss_and_gradient(session, run.run)[0])
        assert slope == pytest.approx((losses[1] - losses[0]) / 8e-3, rel=2e-2)
        assert abs(slope) > 1e-3 * loss
    finally:
        session.close()


@pytest.mark.usefixtures("fresh_device")
def test_it_trains_resumes_and_writes_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = job(tmp_path, rounded_from=str(model_dir("qwen3")))
    describe(planned)
    assert "tables and scales of 14 matrices" in capsys.readouterr().out
    whole = planned.train()
    assert whole.memory.peak_allocated == whole.memory.peak
    state = whole.state
    assert state.last_eval_loss < state.first_eval_loss
    directory = tmp_path / "run"
    trained = load_file(directory / "constants.safetensors")
    # the last step was taken with rounded values, and so was the held-out loss after it
    for form in ("f16", "f32"):
        model = directory / f"last-{form}"
        assert json.loads((model / "config.json").read_text())["quantization_config"]["quant_method"] == "wgpu_lora"
        evaluation = evaluate(model=str(model), data=options(tmp_path).eval_data)
        close = 1e-6 if form == "f16" else 1e-3
        assert evaluation.loss == pytest.approx(state.last_eval_loss, rel=close)
        tables = load_file(model / "model.safetensors")
        assert tables["model.layers.0.mlp.up_proj.weight.table"].dtype == np.dtype(form.replace("f", "float"))
    up = trained["model.layers.0.mlp.up_proj.constants"]
    table = load_file(directory / "last-f32" / "model.safetensors")["model.layers.0.mlp.up_proj.weight.table"]
    np.testing.assert_array_equal(table.reshape(-1), up.reshape(-1)[: table.size])
    best = evaluate(model=str(directory / "best-f32"), data=options(tmp_path).eval_data)
    assert best.loss == pytest.approx(state.best_eval_loss, rel=1e-3)
    card = (directory / "README.md").read_text()
    assert f"{state.unrounded_eval_loss:.4f} before rounding, {state.first_eval_loss:.4f} after rounding" in card

    there = tmp_path / "again"
    assert job(tmp_path, output=str(there)).train(hearing(step=lambda result: result.step == 3)).steps == 3
    resumed = prepare_job(options(tmp_path, output=str(there), resume=True)).train()
    assert resumed.adapter_sha256 == whole.adapter_sha256
    for form in ("f16", "f32"):
        ours, theirs = (place / f"last-{form}" / "model.safetensors" for place in (directory, there))
        assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"base_dtype": "nf4"},
            r"needs a base with lookup tables or group scales, but .* are in NF4: quantise it first",
        ),
        ({"base_dtype": "q2a4-g16", "rounded_from": str(model_dir("qwen2"))}, "is another model than"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        job(tmp_path, **changes)
    assert not (tmp_path / "run").exists()


def test_options_that_contradict_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="trains the base itself, so init_adapter cannot be used"):
        options(tmp_path, init_adapter="somewhere")
    with pytest.raises(UserError, match="contradicts"):
        TrainingArguments(train="mlp", target_modules="q_proj")
    assert TrainingArguments(train="mlp").target_modules == "mlp"
    tasks = [AdapterTask(str(tmp_path / "rows.jsonl"), str(tmp_path / name), name) for name in "ab"]
    with pytest.raises(UserError, match="all adapters of a pipeline share"):
        prepare_multi_adapter_job(options(tmp_path, data=None, eval_data=None), tasks)
    assert not (tmp_path / "a").exists()
