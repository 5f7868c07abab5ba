"""Resuming is exact, and no crash or non-finite number loses what was saved; a longer plan goes on as one run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.cli import Run
from support.events import hearing
from support.sampling import seeds
from support.training.shared_runs import WEIGHTS, killed_run, result, run_options
from support.training.training import model_dir, random_rows

from wgpu_lora.api.call_arguments import Callback
from wgpu_lora.api.multi_adapter import MultiAdapterPipeline
from wgpu_lora.cli.app import main
from wgpu_lora.errors import UserError
from wgpu_lora.events import Evaluating, StepResult
from wgpu_lora.formats.peft_adapter import read_adapter
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.train.job import Job
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.resolve_options import resolve_options
from wgpu_lora.train.run import run_checkpoint
from wgpu_lora.train.run.multi_adapter_state import difference
from wgpu_lora.train.run.records import RunRecord
from wgpu_lora.train.run.resume import check_output_free, merge_resumed_options
from wgpu_lora.train.run.stop_reasons import OUTCOMES, STOP_TEXT
from wgpu_lora.train.run.training_log import LOG, read_log

# Run in a child process, so that it can be killed: argv = options as JSON, the step to die after (0: never).
CHILD = """
import json, os, signal, sys
from wgpu_lora.events import Events
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.prepare_job import prepare_job
options, deadly = json.loads(sys.argv[1]), int(sys.argv[2])
class Deadly(Events):
    def step(self, result):
        print(result.step, flush=True)
        if result.step == deadly:
            os.kill(os.getpid(), signal.SIGKILL)
prepare_job(TrainingArguments(**options)).train(Deadly())
"""


def options(tmp_path: Path, name: str = "run", **changes: object) -> dict[str, Any]:
    """Without held-out rows, unless a test asks for them."""
    return run_options(tmp_path, name, **{"eval_data": None, **changes})


def child(opts: dict[str, object], deadly: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, json.dumps(opts), str(deadly)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def train(device: Device, opts: dict[str, object], callback: Callback = lambda result: None) -> RunRecord:
    return job(device, opts).train(hearing(step=callback))


def job(device: Device, opts: dict[str, object]) -> Job:
    args = TrainingArguments(**opts)
    return prepare_job(args, open_model(str(args.model), device, args.base_dtype))


def weights(directory: Path) -> bytes:
    return (directory / WEIGHTS).read_bytes()


def test_a_killed_run_resumes_byte_for_byte(device: Device, tmp_path: Path, finished_run: Path) -> None:
    """SIGKILL after step 5, in the middle of the second epoch; the last checkpoint is of step 4."""
    arguments, killed = run_options(finished_run, output=str(tmp_path / "run")), tmp_path / "run"
    process = child(arguments, deadly=5)
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL
    assert not (killed / WEIGHTS).exists()
    assert run_checkpoint.list_checkpoints(killed / "checkpoints")[-1][0] == 4
    train(device, arguments | {"resume": True})
    assert result(killed) == result(finished_run / "run")
    final = "checkpoints/step-7/optimizer.safetensors"
    assert (killed / final).read_bytes() == (finished_run / "run" / final).read_bytes()


def test_a_run_that_died_before_its_first_checkpoint_can_begin_again(
    device: Device, tmp_path: Path, finished_run: Path
) -> None:
    run = killed_run(finished_run, tmp_path, step=0)
    assert (run / LOG).exists()
    train(device, run_options(finished_run, output=str(run)))
    assert result(run) == result(finished_run / "run")


@pytest.mark.slow
@pytest.mark.rare
def test_kill_at_random_instants_of_saving_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    """With a checkpoint every step, a kill at any moment leaves a complete newest checkpoint."""
    rng = np.random.default_rng(seeds(1, "saving"))
    for attempt in range(4):
        opts = options(tmp_path, f"run{attempt}", save_steps=1, max_steps=60, save_total_limit=2)
        process = child(opts)
        process.stdout.readline()
        time.sleep(float(rng.uniform(0.05, 0.4)))
        process.kill()
        process.communicate()
        checkpoints = run_checkpoint.list_checkpoints(Path(str(opts["output"])) / "checkpoints")
        for _, directory in checkpoints:
            state, _ = run_checkpoint.read_state(directory)
            assert directory.name == f"step-{state.step}"
            read_adapter(directory)
            load_file(directory / run_checkpoint.OPTIMIZER)


def test_an_interrupt_before_the_first_step_goes_on_as_well(device: Device, tmp_path: Path) -> None:
    heldout = {"eval_data": str(tmp_path / "rows.jsonl"), "max_steps": 2}
    train(device, options(tmp_path, "whole", **heldout))

    def interrupt(evaluating: Evaluating) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    record = job(device, options(tmp_path, **heldout)).train(hearing(evaluating=interrupt))
    assert (record.stop_reason, record.steps, record.state.first_eval_loss) == ("interrupt", 0, None)
    train(device, options(tmp_path, resume=True, **heldout))
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    steps = [[line["step"] for line in read_log(tmp_path / name / LOG)] for name in ("whole", "run")]
    assert steps == [[0, 1, 2]] * 2


def test_the_best_adapter_is_that_of_the_held_out_rows(device: Device, tmp_path: Path) -> None:
    """Other rows, whose losses are higher, have a best adapter of their own; the same rows keep theirs."""
    changes = {"eval_data": str(tmp_path / "rows.jsonl"), "max_steps": 2, "eval_steps": 1, "learning_rate": 1e-2}
    changes |= {"lr_scheduler_type": "constant"}
    first = train(device, options(tmp_path, **changes)).state
    random_rows(tmp_path / "other.jsonl", 4, 301, seed=9)
    changes |= {"eval_data": str(tmp_path / "other.jsonl"), "resume": True}
    for steps in (4, 5):
        state = train(device, options(tmp_path, **{**changes, "max_steps": steps})).state
        losses = {line["step"]: line["eval_loss"] for line in read_log(tmp_path / "run" / LOG) if line["step"] > 2}
        assert first.best_eval_loss is not None
        assert first.best_eval_loss < min(losses.values()) == state.best_eval_loss
        assert run_checkpoint.read_state(tmp_path / "run" / run_checkpoint.BEST)[0].step == state.best_step > 2
        assert state.first_eval_loss is None


def test_resuming_needs_the_same_rows_and_a_checkpoint(device: Device, tmp_path: Path, finished_run: Path) -> None:
    run = Path(shutil.copytree(finished_run / "run", tmp_path / "run"))
    arguments = run_options(finished_run, output=str(run))
    other = str(random_rows(tmp_path / "rows.jsonl", 12, 301, seed=1))
    for changes, words in (
        ({"resume": True, "learning_rate": 5e-4}, r"learning_rate was 0\.001"),
        ({"resume": True, "data": other}, "have changed since the run in"),
        ({}, "already holds a run"),
        ({"resume": True, "output": str(tmp_path / "empty")}, "no checkpoint"),
    ):
        with pytest.raises(UserError, match=words):
            train(device, arguments | changes)


def test_a_nan_stops_the_run_without_an_update(device: Device, tmp_path: Path) -> None:
    """If the loss is not finite after step 2, the run returns to step 1, says why, and keeps no step 2."""
    train(device, options(tmp_path, "good", save_steps=1, save_total_limit=9))
    run = job(device, options(tmp_path, "bad", save_steps=1, save_total_limit=9))

    def poison(result: StepResult) -> None:
        if result.step == 2:
            device.write(run.session.model.decoder.final_norm.storage.buffer, np.full(52, np.nan, np.float32))

    record = run.train(hearing(step=poison))
    assert record.stop_reason == "non-finite"
    assert record.steps == 1
    assert weights(tmp_path / "bad") == weights(tmp_path / "good" / "checkpoints" / "step-1")
    assert [path.name for path in (tmp_path / "bad" / "checkpoints").iterdir()] == ["step-1"]
    assert all(np.isfinite(line["loss"]) for line in read_log(tmp_path / "bad" / LOG))


def test_a_resumed_run_knows_what_it_began_with(qwen2: LoadedModel, tmp_path: Path, finished_run: Path) -> None:
    """If no checkpoint is sound, it falls back to that."""
    arguments = run_options(finished_run, output=str(tmp_path / "run"))
    fresh = prepare_job(TrainingArguments(**arguments), qwen2).run.trainable.initial
    killed_run(finished_run, tmp_path, step=2)
    resumed = prepare_job(TrainingArguments(**arguments, resume=True), qwen2)
    run, session = resumed.run, resumed.session
    run.prepare_directory()
    session.allocate()
    run.place(session)
    run.fall_back(session)
    matrices, moments = session.adapters.read(qwen2.device, 0), session.optimizer.state.read(qwen2.device, 0)
    session.close()
    assert run.state.step == 0
    assert matrices.keys() == fresh.keys()
    for key, pair in fresh.items():
        for have, want in zip(matrices[key], pair, strict=True):
            np.testing.assert_array_equal(have, want)
    assert not any(values.any() for values in moments.values())


def test_an_initial_adapter_sets_the_options_and_survives_resuming(device: Device, tmp_path: Path) -> None:
    """Rank, alpha and targets are the adapter's own, in the record and on the device, also when resumed."""
    train(device, options(tmp_path, "first", lora_r=2, lora_alpha=64, target_modules="q_proj,v_proj", max_steps=2))
    changes = {"init_adapter": str(tmp_path / "first"), "lora_r": 16, "target_modules": "all-linear"}
    whole = train(device, options(tmp_path, "whole", **changes))
    adapter_options = {name: getattr(whole.options, name) for name in ("lora_r", "lora_alpha", "target_modules")}
    assert adapter_options == {"lora_r": 2, "lora_alpha": 64, "target_modules": "q_proj,v_proj"}

    train(device, options(tmp_path, "parts", **changes), lambda result: result.step == 3)
    train(device, options(tmp_path, "parts", lora_r=16, resume=True))
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    with pytest.raises(UserError, match="lora_r=4 contradicts the adapter"):
        train(device, options(tmp_path, "other", init_adapter=str(tmp_path / "first"), lora_r=4))


# -- resuming a run by its directory alone, with a longer plan, or from any adapter of its pipeline --------------------

MOMENTS = "checkpoints/step-8/optimizer.safetensors"


def epoch_options(tmp_path: Path, name: str, **changes: Any) -> dict[str, Any]:
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


def train_epochs(device: Device, settings: dict[str, Any], callback: Callback = lambda result: None) -> RunRecord:
    args, _ = resolve_options(settings, None, "finetune()")
    return prepare_job(args, open_model(str(args.model), device, args.base_dtype)).train(hearing(step=callback))


@pytest.fixture(scope="module")
def finished(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("finished")
    train_epochs(device, epoch_options(place, "run"))
    return place / "run"


@pytest.fixture
def finished_copy(finished: Path, tmp_path: Path) -> Path:
    """A copy of a run of four steps that has finished."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_constant_rate_goes_on_as_one_run(
    device: Device, tmp_path: Path, finished: Path, finished_copy: Path
) -> None:
    record = train_epochs(device, {"output": str(finished_copy), "resume": True, "num_train_epochs": 4.0})
    assert (record.stop_reason, record.steps, record.state.total_steps) == ("epochs", 8, 8)
    whole = tmp_path / "whole"
    train_epochs(device, epoch_options(finished.parent, "whole", output=str(whole), num_train_epochs=4.0))
    for name in (WEIGHTS, MOMENTS):
        assert (finished_copy / name).read_bytes() == (whole / name).read_bytes(), name
    keys = ("step", "epoch", "loss", "eval_loss", "learning_rate", "grad_norm")
    logs = [
        [{key: line.get(key) for key in keys} for line in read_log(place / LOG)] for place in (finished_copy, whole)
    ]
    assert logs[0] == logs[1]
    assert [line["step"] for line in logs[0]] == list(range(9))  # of a short run every one


def test_the_schedule_can_start_anew(device: Device, tmp_path: Path) -> None:
    train_epochs(device, epoch_options(tmp_path, "run", lr_scheduler_type="linear", warmup_steps=1))
    more = {"output": str(tmp_path / "run"), "resume": True, "lr_scheduler_restart": True}
    record = train_epochs(device, {**more, "num_train_epochs": 3.0, "save_steps": 1})
    rates = [line["learning_rate"] for line in read_log(tmp_path / "run" / LOG) if line["step"]]
    assert rates[-2:] == pytest.approx(rates[:2]), "a warm-up to the peak, as at the beginning"
    assert record.state.schedule_start == 4
    again = train_epochs(device, {"output": str(tmp_path / "run"), "resume": True})  # a finished run stays as it is
    assert again.state.schedule_start == 4


@pytest.mark.parametrize(
    ("kind", "more", "message"),
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
    device: Device, tmp_path: Path, kind: str, more: dict[str, Any], message: str
) -> None:
    train_epochs(device, epoch_options(tmp_path, "run", lr_scheduler_type=kind, eval_data=None))
    args, _ = resolve_options({"output": str(tmp_path / "run"), "resume": True, **more}, None, "here")
    job = prepare_job(args, open_model(str(args.model), device, args.base_dtype))
    assert message in job.run.notes[-1]


@pytest.mark.parametrize(
    ("settings", "message"),
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
def test_what_may_not_change(device: Device, finished_copy: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        train_epochs(device, {"output": str(finished_copy), "resume": True, **settings})


def test_a_relative_path_is_found_from_elsewhere(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named = epoch_options(tmp_path, "run", data="rows.jsonl", eval_data=None, output="run", max_steps=1)
    train_epochs(device, named)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    record = train_epochs(device, {"output": "../run", "resume": True, "max_steps": 2})
    assert record.steps == 2


def test_before_the_first_step(device: Device, tmp_path: Path, finished: Path, finished_copy: Path) -> None:
    """The held-out loss that the card calls "before" is that of the start, never another."""
    state = RunRecord.read(finished).state
    first = read_log(finished / LOG)[0]
    assert (first["step"], first["eval_loss"]) == (0, state.first_eval_loss)
    assert state.first_eval_loss > state.last_eval_loss
    card = (finished / "README.md").read_text()
    assert f"| {first['eval_loss']:.4f} before, {state.last_eval_loss:.4f} after" in card
    record = train_epochs(device, epoch_options(tmp_path, "without", eval_on_start=False))
    assert record.state.first_eval_loss is None
    card = (tmp_path / "without" / "README.md").read_text()
    assert f"| {state.last_eval_loss:.4f} after" in card
    assert "before" not in card.partition("## Result")[2].partition("## Options")[0]
    for file in (WEIGHTS, "checkpoints/step-4/optimizer.safetensors"):  # it changes nothing else
        assert (tmp_path / "without" / file).read_bytes() == (finished / file).read_bytes()
    again: list[int | None] = []
    args, _ = resolve_options(
        {"output": str(finished_copy), "resume": True, "num_train_epochs": 2.5}, None, "finetune()"
    )
    hear = hearing(evaluating=lambda evaluation: again.append(evaluation.step))
    prepare_job(args, open_model(str(args.model), device, args.base_dtype)).train(hear)
    assert again
    assert 0 not in again  # once for a run, not when it is resumed


def test_every_ending_has_one_of_four_words() -> None:
    assert OUTCOMES.keys() == STOP_TEXT.keys()
    assert set(OUTCOMES.values()) == {"finished", "stopped early", "interrupted", "failed"}


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two adapters trained for two epochs; only their own directories are given."""
    monkeypatch.chdir(tmp_path)
    values = epoch_options(tmp_path, "unused", num_train_epochs=2.0, save_total_limit=1)
    del values["data"], values["output"], values["model"]
    tasks = [{"data": "rows.jsonl", "checkpoint": f"out/{name}"} for name in "ab"]
    MultiAdapterPipeline(tasks, str(model_dir("qwen2")), **values).train()
    return tmp_path


def test_a_pipeline_lives_with_its_adapters(pipeline: Path, run: Run) -> None:
    """Nothing is written elsewhere, only the newest epoch is kept, and either adapter resumes both."""
    assert {path.name for path in pipeline.iterdir()} == {"rows.jsonl", "heldout.jsonl", "out"}
    assert {path.name for path in (pipeline / "out").iterdir()} == {"a", "b"}
    for name in "ab":
        assert [path.name for path in (pipeline / "out" / name).glob("epoch-*")] == ["epoch-2"]
    model = ["--model", str(model_dir("qwen2")), "--max-length", "16", "--no-tune"]
    beside = ["--adapters", "rows.jsonl:out/c", "--adapters", "rows.jsonl:out/d", "--max-steps", "1"]
    assert main(["finetune", *model, *beside]) == 0
    assert (
        "already belongs to a pipeline"
        in run("finetune", *model, *beside[:2], "--adapters", "rows.jsonl:out/a").refusal()
    )
    shutil.move(pipeline / "out", pipeline / "moved")
    printed = run("finetune", "--output", "moved/b", "--resume", "--num-train-epochs", "3").output()
    assert printed.count("with the same result as a single run of 6 steps") == 2
    for name in "ab":
        assert json.loads((pipeline / "moved" / name / "run.json").read_text())["state"]["step"] == 6
    again = ["--adapters", "rows.jsonl:moved/a", "--adapters", "rows.jsonl:moved/b", "--resume"]
    assert "seed was 42, not 5" in run("finetune", *again, "--seed", "5").refusal()
    assert run("finetune", *again).output().count("already finished") == 2
    shutil.move(pipeline / "moved" / "b", pipeline / "b")
    assert "does not lead to the record of its pipeline" in run("finetune", "--output", "b", "--resume").refusal()


def test_epochs_that_are_asked_for_now_win_over_a_limit_of_before(tmp_path: Path) -> None:
    recorded = {"max_steps": 4, "num_train_epochs": 2.0}
    assert merge_resumed_options({"num_train_epochs": 3.0}, recorded, None, tmp_path, "here").max_steps == -1
    for settings in ({"num_train_epochs": 2.0}, {"max_steps": 4}, {}):
        assert merge_resumed_options(settings, recorded, None, tmp_path, "here").max_steps == 4


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
