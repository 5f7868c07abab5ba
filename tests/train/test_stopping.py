"""A signal at any moment of a training: nothing more is submitted, and the resumed run is the one that went on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.events import hearing
from support.rows.sources import write_source
from support.training.shared_runs import multi_adapter_options, multi_adapter_tasks, result, run_options
from support.training.training import golden_arguments

from wgpu_lora import api
from wgpu_lora.api.multi_adapter import MultiAdapterPipeline
from wgpu_lora.events import Evaluating, Events
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Program
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.processes.signals import Stopped, check_stop, stoppable
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.run.training_log import LOG, read_log
from wgpu_lora.train.session.session import Session


class Signal:
    """Sends SIGTERM once `due`; `submits` are what the device was given since."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, due: Callable[[], bool]):
        self.due, self.sent, self.submits = due, False, 0
        submit = Program.submit

        def counted(program: Program, *arguments: Any) -> None:
            submit(program, *arguments)
            self.submits += self.sent

        monkeypatch.setattr(Program, "submit", counted)

    def check(self, *_: object) -> None:
        if not self.sent and self.due():
            self.sent = True
            os.kill(os.getpid(), signal.SIGTERM)


def evaluation_of(step: int, adapter: str | None = None) -> Callable[[Evaluating], bool]:
    return lambda at: (at.step, at.rows, at.adapter) == (step, 0, adapter)


@pytest.mark.parametrize(
    ("place", "step"),
    [("batch 1", 0), ("batch 5", 2), ("evaluation 0", 0), ("evaluation 4", 4), ("evaluation 7", 7)],
)
def test_the_rest_is_done_when_the_run_is_resumed(
    qwen2: LoadedModel, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, step: int
) -> None:
    """Amid the batches of a step, and amid held-out losses: the first, one between steps, and the last."""
    kind, number = place.split()
    options = run_options(finished_run, output=str(tmp_path / "run"))
    del options["model"]
    batches, due = iter(range(99)), False
    with monkeypatch.context() as patched:
        to_send = Signal(patched, lambda: due)
        accumulate = Session.accumulate

        def counted(session: Session, groups: Any) -> None:
            nonlocal due
            accumulate(session, groups)
            due = kind == "batch" and next(batches) + 1 == int(number)
            to_send.check()

        def evaluating(at: Evaluating) -> None:
            nonlocal due
            due = kind == "evaluation" and evaluation_of(int(number))(at)
            to_send.check()

        patched.setattr(Session, "accumulate", counted)
        record = prepare_job(TrainingArguments(**options), qwen2).train(hearing(evaluating=evaluating))
    assert (record.stop_reason, record.signal, record.state.step) == ("interrupt", "SIGTERM", step)
    assert to_send.sent
    assert to_send.submits == 0
    path = tmp_path / "run" / LOG
    logged = [line["step"] for line in read_log(path)] if path.exists() else []
    assert logged == [*range(step + (kind == "batch"))]  # the held-out loss is on the line of its step
    api.finetune(qwen2, resume=True, output=str(tmp_path / "run"))
    assert result(tmp_path / "run") == result(finished_run / "run")


def test_adapters_of_a_pipeline_each_do_their_rest(
    qwen2: LoadedModel, finished_multi_adapter_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = multi_adapter_options(max_steps=4, save_steps=1, output=str(tmp_path / "run" / "pipeline"))
    adapters = multi_adapter_tasks(finished_multi_adapter_run, "run")
    for adapter in adapters:
        adapter["checkpoint"] = str(tmp_path / "run" / Path(adapter["checkpoint"]).name)

    class Interrupt(Events):
        def evaluating(self, at: Evaluating) -> None:
            if evaluation_of(2, "a")(at) or (at.step and at.rows == 0 and at.adapter == "a"):
                os.kill(os.getpid(), signal.SIGTERM)

    MultiAdapterPipeline(adapters, qwen2, **how).train(events=Interrupt())
    MultiAdapterPipeline(adapters, qwen2, **how, resume=True).train()
    for name in "abc":
        assert result(tmp_path / "run" / name) == result(finished_multi_adapter_run / "run" / name)


HANGING = """
import os, pathlib, time
def hanging(completions, **columns):
    pathlib.Path(__file__).with_name("pid").write_text(str(os.getpid()))
    time.sleep(600)
"""


def test_a_reward_function_that_hangs(device: Device, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(HANGING)
    data = write_source(tmp_path / "prompts.jsonl", [{"prompt_ids": [1 + i, 2, 3]} for i in range(4)])
    options = {
        "objective": "grpo", "data": str(data), "reward_funcs": f"{tmp_path}/rewards.py:hanging", "base_dtype": "f32",
        "max_steps": 2, "num_generations": 2, "max_completion_length": 4, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
    }  # fmt: skip

    def stop() -> None:
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    begin = time.monotonic()
    record = prepare_job(golden_arguments(tmp_path, "qwen2", **options)).train()
    assert (record.stop_reason, record.state.step) == ("interrupt", 0)
    assert time.monotonic() - begin < 120  # of 600
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_no_pipeline_is_compiled_any_more(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "@compute @workgroup_size(1) fn main() {}"
    with stoppable(lambda: True):
        with pytest.raises(Stopped):
            device.compute_pipeline(("stopped",), lambda: source)
        with pytest.raises(Stopped):
            check_stop()
    check_stop()


def test_work_is_divided_by_how_long_it_takes(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is timed, in smaller pieces once one was slow; later again, if the device has become slower."""
    program = Program(device)
    program.dispatches = [_Step()] * 48  # type: ignore[list-item]
    clock = iter(range(10**6))
    monkeypatch.setattr("wgpu_lora.gpu.program.time.perf_counter", lambda: next(clock) * 1.0)
    pieces = [stop - start for start, stop in program._pieces(0, 48)]
    assert pieces[0] == 24
    assert max(pieces[1:-1]) < 12
    assert sum(pieces) == 48


class _Step:
    class kernel:
        tuning = None
