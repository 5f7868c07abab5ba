"""Resuming is exact, and no crash, full disk or non-finite number loses what was saved before."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.events import hearing
from support.sampling import seeds
from support.training import model_dir, random_rows

from wgpu_lora.api.call_arguments import Callback
from wgpu_lora.errors import UserError
from wgpu_lora.events import Evaluating, StepResult
from wgpu_lora.formats.peft_adapter import read_adapter
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.train.finetune import Job, prepare_job
from wgpu_lora.train.loop.trainer import Trainer
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run import run_checkpoint
from wgpu_lora.train.run.records import RUN, RunRecord
from wgpu_lora.train.run.training_log import LOG, read_log

# Run in a child process, so that it can be killed: argv = options as JSON, the step to die after (0: never).
CHILD = """
import json, os, signal, sys
from wgpu_lora.events import Events
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.finetune import prepare_job
options, deadly = json.loads(sys.argv[1]), int(sys.argv[2])
class Deadly(Events):
    def step(self, result):
        print(result.step, flush=True)
        if result.step == deadly:
            os.kill(os.getpid(), signal.SIGKILL)
prepare_job(TrainingArguments(**options)).train(Deadly())
"""


def options(tmp_path: Path, name: str = "run", **changes: object) -> dict[str, object]:
    """With dropout and accumulation, three steps per epoch, a checkpoint every other step."""
    data = tmp_path / "rows.jsonl"
    if not data.exists():
        random_rows(data, 12, 301)
    return {
        "model": str(model_dir("qwen2")),
        "data": str(data),
        "output": str(tmp_path / name),
        "lora_r": 4,
        "lora_dropout": 0.1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_length": 16,
        "packing": False,
        "max_steps": 7,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
    } | changes


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
    return (directory / "adapter_model.safetensors").read_bytes()


def test_a_killed_run_resumes_byte_for_byte(device: Device, tmp_path: Path) -> None:
    """SIGKILL after step 5, in the middle of the second epoch; the last checkpoint is of step 4."""
    train(device, options(tmp_path, "whole"))
    process = child(options(tmp_path, "killed"), deadly=5)
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "adapter_model.safetensors").exists()
    assert run_checkpoint.list_checkpoints(tmp_path / "killed" / "checkpoints")[-1][0] == 4
    train(device, options(tmp_path, "killed", resume=True))
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    final = "checkpoints/step-7/optimizer.safetensors"
    assert (tmp_path / "killed" / final).read_bytes() == (tmp_path / "whole" / final).read_bytes()
    logs = [read_log(tmp_path / name / LOG) for name in ("whole", "killed")]
    timeless = [[{k: v for k, v in line.items() if "second" not in k} for line in log] for log in logs]
    assert timeless[0] == timeless[1]


@pytest.mark.slow
@pytest.mark.rare
def test_kill_at_random_instants_of_saving_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    """With a checkpoint every step, a kill at any moment leaves a complete newest checkpoint."""
    rng = np.random.default_rng(seeds(1, "saving"))
    for attempt in range(4):
        opts = options(tmp_path, f"run{attempt}", save_steps=1, max_steps=60, save_total_limit=2)
        process = child(opts)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(float(rng.uniform(0.05, 0.4)))
        process.kill()
        process.communicate()
        found = run_checkpoint.list_checkpoints(Path(str(opts["output"])) / "checkpoints")
        for _, directory in found:
            state, _ = run_checkpoint.read_state(directory)
            assert directory.name == f"step-{state.step}"
            read_adapter(directory)
            load_file(directory / run_checkpoint.OPTIMIZER)


def test_interrupt_saves_and_says_so(device: Device, tmp_path: Path) -> None:
    def interrupt(result: StepResult) -> None:
        if result.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    record = train(device, options(tmp_path, save_steps=0), interrupt)
    assert record.stop_reason == "interrupt"
    assert run_checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")[-1][0] == 3
    assert (tmp_path / "run" / "adapter_model.safetensors").exists()
    record = train(device, options(tmp_path, save_steps=0, resume=True))
    assert record.stop_reason == "max steps"


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


def test_resume_refuses_other_options_and_data(device: Device, tmp_path: Path) -> None:
    train(device, options(tmp_path, max_steps=2))
    with pytest.raises(UserError, match=r"learning_rate was 0\.001"):
        train(device, options(tmp_path, max_steps=2, resume=True, learning_rate=5e-4))
    random_rows(tmp_path / "rows.jsonl", 12, 301, seed=1)
    with pytest.raises(UserError, match="have changed since the run in"):
        train(device, options(tmp_path, max_steps=2, resume=True))
    with pytest.raises(UserError, match="already holds a run"):
        train(device, options(tmp_path, max_steps=2))
    with pytest.raises(UserError, match="no checkpoint"):
        train(device, options(tmp_path, "empty", resume=True))


def test_a_full_disk_keeps_what_was_saved(device: Device, tmp_path: Path) -> None:
    """A file size limit stands in for a full disk: saving fails, and the earlier checkpoint is unchanged."""
    run = job(device, options(tmp_path, max_steps=2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    session = run.session
    run.run.prepare_directory()
    session.allocate()
    run.run.place(session)
    Trainer(session, [run.run]).train()
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    run.run.state.step += 1
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(OSError, match=r"."):
            run.run.save(session)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
        session.close()
    after = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert after == before


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


def test_a_resumed_run_knows_what_it_began_with(device: Device, tmp_path: Path) -> None:
    """If no checkpoint is sound, it falls back to that."""
    fresh = job(device, options(tmp_path)).run.subject.initial
    train(device, options(tmp_path, max_steps=1))
    resumed = job(device, options(tmp_path, max_steps=1, resume=True))
    run, session = resumed.run, resumed.session
    run.prepare_directory()
    session.allocate()
    try:
        run.place(session)
        run.fall_back(session)
        found = session.adapters.read(device, 0)
        moments = session.optimizer.state.read(device, 0)
    finally:
        session.close()
    assert run.state.step == 0
    assert found.keys() == fresh.keys()
    for key, pair in fresh.items():
        for have, want in zip(found[key], pair, strict=True):
            np.testing.assert_array_equal(have, want)
    assert moments
    assert not any(values.any() for values in moments.values())


def test_target_seconds_fixes_a_budget(device: Device, tmp_path: Path) -> None:
    """The last step, which is known only afterwards, still gets its log line and held-out loss."""
    rare = {"logging_steps": 10**6, "eval_steps": 10**6, "save_steps": 0}
    heldout = str(random_rows(tmp_path / "heldout.jsonl", 3, 301, seed=2))
    limits = {"max_steps": -1, "num_train_epochs": 1000.0, "target_seconds": 2.0}
    record = train(device, options(tmp_path, eval_data=heldout, **rare, **limits))
    state = record.state
    assert record.stop_reason == "target seconds"
    assert state.calibrated
    assert state.step <= state.total_steps
    line = read_log(tmp_path / "run" / LOG)[-1]
    assert (line["step"], line["eval_loss"]) == (state.step, state.last_eval_loss)
    assert json.loads((tmp_path / "run" / RUN).read_text())["state"]["seconds"] > 0


def test_a_run_that_died_before_its_first_checkpoint_can_begin_again(device: Device, tmp_path: Path) -> None:
    process = child(options(tmp_path, save_steps=0), deadly=1)
    process.communicate(timeout=300)
    assert (tmp_path / "run" / ".lock").exists()
    record = train(device, options(tmp_path, max_steps=2))
    assert record.steps == 2
    assert [line["step"] for line in read_log(tmp_path / "run" / LOG)] == [1, 2]


def test_an_initial_adapter_sets_the_options_and_survives_resuming(device: Device, tmp_path: Path) -> None:
    """Rank, alpha and targets are the adapter's own, in the record and on the device, also when resumed."""
    train(device, options(tmp_path, "first", lora_r=2, lora_alpha=64, target_modules="q_proj,v_proj", max_steps=2))
    changes = {"init_adapter": str(tmp_path / "first"), "lora_r": 16, "target_modules": "all-linear"}
    whole = train(device, options(tmp_path, "whole", **changes))
    kept = {name: getattr(whole.options, name) for name in ("lora_r", "lora_alpha", "target_modules")}
    assert kept == {"lora_r": 2, "lora_alpha": 64, "target_modules": "q_proj,v_proj"}

    def stop(result: StepResult) -> None:
        if result.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    train(device, options(tmp_path, "parts", **changes), stop)
    train(device, options(tmp_path, "parts", lora_r=16, resume=True))
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    with pytest.raises(UserError, match="lora_r=4 contradicts the adapter"):
        train(device, options(tmp_path, "other", init_adapter=str(tmp_path / "first"), lora_r=4))


def test_target_seconds_and_max_steps_together(device: Device, tmp_path: Path) -> None:
    """Few steps per epoch do not end a timed run early; --max-steps does."""
    record = train(device, options(tmp_path, "a", max_steps=9, target_seconds=300.0, num_train_epochs=1.0))
    assert (record.stop_reason, record.steps) == ("max steps", 9)
    record = train(device, options(tmp_path, "b", max_steps=-1, target_seconds=3.0, num_train_epochs=1.0))
    assert record.stop_reason == "target seconds"
    assert record.steps > 3
