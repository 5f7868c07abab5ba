"""Resuming a run by its directory alone, with a longer plan, or from any adapter of its pipeline."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.events import hearing
from support.training import model_dir, random_rows

from wgpu_lora.api.call_arguments import Callback
from wgpu_lora.api.multi_adapter import MultiAdapterPipeline
from wgpu_lora.cli import main
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.train import finetune
from wgpu_lora.train.resolve_options import resolve_options
from wgpu_lora.train.run.pipeline_state import difference
from wgpu_lora.train.run.records import RunRecord
from wgpu_lora.train.run.resume import check_output_free, merge_resumed_options
from wgpu_lora.train.run.stop_reasons import OUTCOMES, STOP_TEXT
from wgpu_lora.train.run.training_log import LOG, read_log

WEIGHTS, MOMENTS = "adapter_model.safetensors", "checkpoints/step-8/optimizer.safetensors"


def options(tmp_path: Path, name: str, **changes: Any) -> dict[str, Any]:
    """Two epochs of two steps, with held-out rows."""
    for seed, data in enumerate(("rows.jsonl", "heldout.jsonl")):
        if not (tmp_path / data).exists():
            random_rows(tmp_path / data, 8 - 4 * seed, 301, seed)
    return {
        "model": str(model_dir("qwen2")),
        "data": str(tmp_path / "rows.jsonl"),
        "eval_data": str(tmp_path / "heldout.jsonl"),
        "output": str(tmp_path / name),
        "lora_r": 4,
        "lora_dropout": 0.1,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "packing": False,
        "max_length": 16,
        "num_train_epochs": 2.0,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
    } | changes


def train(device: Device, given: dict[str, Any], callback: Callback = lambda result: None) -> RunRecord:
    args, _ = resolve_options(given, None, "finetune()")
    return finetune.prepare_job(args, open_model(str(args.model), device, args.base_dtype)).train(
        hearing(step=callback)
    )


@pytest.fixture(scope="module")
def finished(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("finished")
    train(device, options(place, "run"))
    return place / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of a run of four steps that has finished."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_constant_rate_goes_on_as_one_run(device: Device, tmp_path: Path, finished: Path, run: Path) -> None:
    record = train(device, {"output": str(run), "resume": True, "num_train_epochs": 4.0})
    assert (record.stop_reason, record.steps, record.state.total_steps) == ("epochs", 8, 8)
    whole = tmp_path / "whole"
    train(device, options(finished.parent, "whole", output=str(whole), num_train_epochs=4.0))
    for name in (WEIGHTS, MOMENTS):
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name
    kept = ("step", "epoch", "loss", "eval_loss", "learning_rate", "grad_norm")
    logs = [[{key: line.get(key) for key in kept} for line in read_log(place / LOG)] for place in (run, whole)]
    assert logs[0] == logs[1]
    assert [line["step"] for line in logs[0]] == list(range(9))  # of a short run every one


def test_the_schedule_can_start_anew(device: Device, tmp_path: Path) -> None:
    train(device, options(tmp_path, "run", lr_scheduler_type="linear", warmup_steps=1))
    more = {"output": str(tmp_path / "run"), "resume": True, "lr_scheduler_restart": True}
    record = train(device, {**more, "num_train_epochs": 3.0, "save_steps": 1})
    rates = [line["learning_rate"] for line in read_log(tmp_path / "run" / LOG) if line["step"]]
    assert rates[-2:] == pytest.approx(rates[:2]), "a warm-up to the peak, as at the beginning"
    assert record.state.schedule_start == 4
    again = train(device, {"output": str(tmp_path / "run"), "resume": True})  # a finished run stays as it is
    assert again.state.schedule_start == 4


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        (
            "constant",
            {"num_train_epochs": 3.0},
            "step 4 of 4, up to 6 steps, with the same result as a single run of 6 steps",
        ),
        ("cosine", {"max_steps": 20}, "the cosine schedule is now that of 20 steps, so the next learning rate is"),
        ("cosine", {}, "already finished; a larger num_train_epochs"),
    ],
)
def test_what_a_longer_plan_does_is_said(
    device: Device, tmp_path: Path, kind: str, more: dict[str, Any], said: str
) -> None:
    train(device, options(tmp_path, "run", lr_scheduler_type=kind, eval_data=None))
    args, _ = resolve_options({"output": str(tmp_path / "run"), "resume": True, **more}, None, "here")
    job = finetune.prepare_job(args, open_model(str(args.model), device, args.base_dtype))
    assert said in job.run.notes[-1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"learning_rate": 0.5},
            "was 0.001, not 0.5; leave it out, since only these may change: data,",
        ),
        ({"num_train_epochs": 1.0}, "already taken 4 steps, more than the 2 of num_train_epochs=1.0: give a larger"),
        (
            {"target_seconds": 9.0},
            "planned by num_train_epochs or max_steps, so resume cannot extend it by target",
        ),
    ],
)
def test_what_may_not_change(device: Device, run: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        train(device, {"output": str(run), "resume": True, **given})


def test_a_relative_path_is_found_from_elsewhere(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named = options(tmp_path, "run", data="rows.jsonl", eval_data=None, output="run", max_steps=1)
    train(device, named)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    record = train(device, {"output": "../run", "resume": True, "max_steps": 2})
    assert record.steps == 2


def test_before_the_first_step(device: Device, tmp_path: Path, finished: Path, run: Path) -> None:
    """The held-out loss that the card calls "before" is that of the start, never another."""
    state = RunRecord.read(finished).state
    first = read_log(finished / LOG)[0]
    assert (first["step"], first["eval_loss"]) == (0, state.first_eval_loss)
    assert state.first_eval_loss > state.last_eval_loss
    card = (finished / "README.md").read_text()
    assert f"| {first['eval_loss']:.4f} before, {state.last_eval_loss:.4f} after" in card
    record = train(device, options(tmp_path, "without", eval_on_start=False))
    assert record.state.first_eval_loss is None
    card = (tmp_path / "without" / "README.md").read_text()
    assert f"| {state.last_eval_loss:.4f} after" in card
    assert "before" not in card.partition("## Result")[2].partition("## Options")[0]
    for file in (WEIGHTS, "checkpoints/step-4/optimizer.safetensors"):  # it changes nothing else
        assert (tmp_path / "without" / file).read_bytes() == (finished / file).read_bytes()
    again: list[int | None] = []
    args, _ = resolve_options({"output": str(run), "resume": True, "num_train_epochs": 2.5}, None, "finetune()")
    hear = hearing(evaluating=lambda found: again.append(found.step))
    finetune.prepare_job(args, open_model(str(args.model), device, args.base_dtype)).train(hear)
    assert again
    assert 0 not in again  # once for a run, not when it is resumed


def test_every_ending_has_one_of_four_words() -> None:
    assert OUTCOMES.keys() == STOP_TEXT.keys()
    assert set(OUTCOMES.values()) == {"finished", "stopped early", "interrupted", "failed"}


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two adapters trained for two epochs; only their own directories are given."""
    monkeypatch.chdir(tmp_path)
    values = options(tmp_path, "unused", num_train_epochs=2.0, save_total_limit=1)
    del values["data"], values["output"], values["model"]
    tasks = [{"data": "rows.jsonl", "checkpoint": f"out/{name}"} for name in "ab"]
    MultiAdapterPipeline(tasks, str(model_dir("qwen2")), **values).train()
    return tmp_path


def test_a_pipeline_lives_with_its_adapters(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is written elsewhere, only the newest epoch is kept, and either adapter resumes both."""
    assert {path.name for path in pipeline.iterdir()} == {"rows.jsonl", "heldout.jsonl", "out"}
    assert {path.name for path in (pipeline / "out").iterdir()} == {"a", "b"}
    for name in "ab":
        assert [path.name for path in (pipeline / "out" / name).glob("epoch-*")] == ["epoch-2"]
    model = ["--model", str(model_dir("qwen2")), "--max-length", "16", "--no-tune"]
    beside = ["--adapters", "rows.jsonl:out/c", "--adapters", "rows.jsonl:out/d", "--max-steps", "1"]
    assert main(["finetune", *model, *beside]) == 0
    assert main(["finetune", *model, *beside[:2], "--adapters", "rows.jsonl:out/a"]) == 2
    assert "already belongs to a pipeline" in capsys.readouterr().err
    shutil.move(pipeline / "out", pipeline / "moved")
    assert main(["finetune", "--output", "moved/b", "--resume", "--num-train-epochs", "3"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("with the same result as a single run of 6 steps") == 2
    for name in "ab":
        assert json.loads((pipeline / "moved" / name / "run.json").read_text())["state"]["step"] == 6
    again = ["--adapters", "rows.jsonl:moved/a", "--adapters", "rows.jsonl:moved/b", "--resume"]
    assert main(["finetune", *again, "--seed", "5"]) == 2
    assert "seed was 42, not 5" in capsys.readouterr().err
    assert main(["finetune", *again]) == 0
    assert capsys.readouterr().out.count("already finished") == 2
    shutil.move(pipeline / "moved" / "b", pipeline / "b")
    assert main(["finetune", "--output", "b", "--resume"]) == 2
    assert "does not lead to the record of its pipeline" in capsys.readouterr().err


def test_epochs_that_are_asked_for_now_win_over_a_limit_of_before(tmp_path: Path) -> None:
    recorded = {"max_steps": 4, "num_train_epochs": 2.0}
    assert merge_resumed_options({"num_train_epochs": 3.0}, recorded, None, tmp_path, "here").max_steps == -1
    for given in ({"num_train_epochs": 2.0}, {"max_steps": 4}, {}):
        assert merge_resumed_options(given, recorded, None, tmp_path, "here").max_steps == 4


def test_what_differs_between_pipelines() -> None:
    def identity(*names: str, weight: float = 1.0, **changes: Any) -> dict[str, Any]:
        adapters = [{"name": name, "weight": weight} for name in names]
        return {"schedule": "synchronized", "adapters": adapters, "options": {"seed": 42}} | changes

    before = identity("a", "b")
    assert difference(before, identity("a", "b", "c", batch_tokens=3)) == "its adapters were a, b, not a, b, c"
    assert difference(before, identity("a", "b", weight=2.0)) == "the weight of adapter 'a' was 1.0, not 2.0"
    assert difference(before, identity("a", "b", options={"seed": 5})) == "seed was 42, not 5"


def test_a_pipelines_home_is_no_place_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(UserError, match="already belongs to a pipeline"):
        check_output_free(tmp_path)
