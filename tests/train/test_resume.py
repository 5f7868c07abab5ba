"""Resuming is exact, and no crash, full disk or non-finite number loses what was saved before."""

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
from support.events import hearing
from support.sampling import seeds
from support.shared_runs import WEIGHTS, killed_run, result, run_options
from support.training import random_rows

from wgpu_lora.api.call_arguments import Callback
from wgpu_lora.errors import UserError
from wgpu_lora.events import Evaluating, StepResult
from wgpu_lora.formats.peft_adapter import read_adapter
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.train.finetune import Job, prepare_job
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run import run_checkpoint
from wgpu_lora.train.run.records import RunRecord
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
    given, killed = run_options(finished_run, output=str(tmp_path / "run")), tmp_path / "run"
    process = child(given, deadly=5)
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL
    assert not (killed / WEIGHTS).exists()
    assert run_checkpoint.list_checkpoints(killed / "checkpoints")[-1][0] == 4
    train(device, given | {"resume": True})
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


def test_resuming_needs_the_same_rows_and_a_checkpoint(device: Device, tmp_path: Path, finished_run: Path) -> None:
    run = Path(shutil.copytree(finished_run / "run", tmp_path / "run"))
    given = run_options(finished_run, output=str(run))
    other = str(random_rows(tmp_path / "rows.jsonl", 12, 301, seed=1))
    for changes, words in (
        ({"resume": True, "learning_rate": 5e-4}, r"learning_rate was 0\.001"),
        ({"resume": True, "data": other}, "have changed since the run in"),
        ({}, "already holds a run"),
        ({"resume": True, "output": str(tmp_path / "empty")}, "no checkpoint"),
    ):
        with pytest.raises(UserError, match=words):
            train(device, given | changes)


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
