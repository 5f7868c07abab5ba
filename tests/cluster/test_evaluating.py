"""Held-out losses on another device: which copies are measured, of which files, and that they are training's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cli import QWEN2, ROWS, SMALL, write_rows
from support.fake_cluster import FakeCluster, task_view

from wgpu_lora.cluster.client.evaluated import write_evaluations
from wgpu_lora.cluster.coordinator import evaluating
from wgpu_lora.cluster.coordinator.evaluating import Evaluating
from wgpu_lora.cluster.facts import Copy, RunRequest, RunRequirements, Task
from wgpu_lora.cluster.node.evaluator import Evaluator, newest_adapter
from wgpu_lora.cluster.node.listing import FileFacts
from wgpu_lora.errors import UserError
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.options.training_arguments import TrainingArguments, from_values

TASKS = [Task("a", {}, "/a"), Task("b", {}, "/b")]
PLAN = RunRequirements(1, heldout=True)
REQUEST = RunRequest("r", TASKS, {"a": {"p": PLAN}, "b": {"p": PLAN}}, eval_device="10.0.0.1/x")


def copy(step: int, *names: str, final: bool = False) -> Copy:
    return Copy("r/a", 1, "d" * 64, dict.fromkeys(names or ("a",), step), 1, final)


class Device:
    """Measures when it is let to."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.heard: list[tuple[str, int, float]] = []
        self.said: list[str] = []
        self.rested: list[str] = []
        self.wrong: Exception | None = None
        self.evaluating = Evaluating(self.measure, self.rest, self.hear, self.said.append)

    async def measure(self, device: str, run: str, task: Task, of: Copy) -> dict[str, Any]:
        self.asked.append((task.name, of.steps[task.name]))
        await asyncio.sleep(0)
        if self.wrong:
            raise self.wrong
        return {"step": of.steps[task.name], "loss": 1.5}

    async def rest(self, device: str) -> None:
        self.rested.append(device)

    def hear(self, run: str, task: str, step: int, loss: float) -> None:
        self.heard.append((task, step, loss))


def through(act: Callable[[Device], None], monkeypatch: pytest.MonkeyPatch) -> Device:
    """What a device has done after some copies."""
    monkeypatch.setattr(evaluating, "REST_SECONDS", 0.0)

    async def play() -> Device:
        device = Device()
        act(device)
        for _ in range(50):
            await asyncio.sleep(0)
        return device

    return asyncio.run(play())


def test_a_copy_that_comes_later_is_measured_at_once() -> None:
    async def play() -> Device:
        device = Device()
        for step in (10, 20):
            device.evaluating.copied(copy(step), TASKS, REQUEST)
            for _ in range(20):
                await asyncio.sleep(0)
        return device

    device = asyncio.run(play())  # REST_SECONDS are not over
    assert device.heard == [("a", 10, 1.5), ("a", 20, 1.5)]
    assert device.rested == []


def test_only_the_newest_copy_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(device: Device) -> None:
        for step in (10, 20, 30):
            device.evaluating.copied(copy(step, "a", "b"), TASKS, REQUEST)

    device = through(act, monkeypatch)
    assert device.heard == [("a", 30, 1.5), ("b", 30, 1.5)]
    assert device.rested == ["10.0.0.1/x"]


def test_what_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(device: Device) -> None:
        device.evaluating.copied(copy(10, final=True), TASKS[:1], REQUEST)
        device.evaluating.copied(copy(10), TASKS[:1], RunRequest("r", TASKS, REQUEST.plans))
        device.evaluating.copied(copy(10), TASKS[:1], RunRequest("r", TASKS, {"a": {}}, eval_device="x"))
        device.evaluating.copied(copy(0), TASKS[:1], REQUEST)

    assert through(act, monkeypatch).asked == []


def test_a_failure_is_said_and_the_next_copy_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(device: Device) -> None:
        device.wrong = UserError("It has no room.")
        device.evaluating.copied(copy(10), TASKS[:1], REQUEST)

    device = through(act, monkeypatch)
    assert device.said == ["r: the held-out loss of a was not measured: It has no room."]
    assert device.heard == []


def test_a_step_that_was_measured_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> Device:
        device = Device()
        for _ in range(2):  # the unit has moved, and was restored from that step
            device.evaluating.copied(copy(10), TASKS[:1], REQUEST)
            for _ in range(20):
                await asyncio.sleep(0)
        return device

    monkeypatch.setattr(evaluating, "REST_SECONDS", 0.0)
    assert asyncio.run(play()).asked == [("a", 10)]


def files(*paths: str) -> list[FileFacts]:
    return [FileFacts(path, "0" * 64, 1) for path in paths]


def checkpoint(folder: str) -> list[FileFacts]:
    names = ("adapter_config.json", "adapter_model.safetensors", "state.json", "optimizer.safetensors")
    return files(*(f"{folder}/{name}" for name in names))


def test_the_newest_adapter_of_a_copy() -> None:
    found = [*checkpoint("adapters/a/checkpoints/step-9"), *checkpoint("adapters/a/checkpoints/step-10")]
    folder, wanted = newest_adapter("a", [*found, *checkpoint("adapters/a/best"), *checkpoint("adapters/b/last")])
    assert folder == "adapters/a/checkpoints/step-10"
    assert {file.path.rpartition("/")[2] for file in wanted} == {
        "adapter_config.json", "adapter_model.safetensors", "state.json",
    }  # fmt: skip
    assert newest_adapter("b", checkpoint("adapters/b/last"))[0] == "adapters/b/last"
    with pytest.raises(UserError, match="The copy of a has no checkpoint of an adapter"):
        newest_adapter("a", [*files("adapters/a/log.jsonl"), *checkpoint("adapters/ab/last")])


@pytest.mark.slow
def test_the_loss_is_that_of_training(tmp_path: Path) -> None:
    """Measured by a process of its own from a copy's files, also for rows that training has drawn from its data."""
    data, heldout = write_rows(tmp_path / "rows.jsonl", ROWS), {"validation_split": 0.5}
    options = {**SMALL, "model": QWEN2, "data": str(data), "save_steps": 1, "eval_steps": 1, **heldout}
    output = tmp_path / "adapters/a"
    args = from_values({**options, "output": str(output)}, "test", TrainingArguments())
    job = prepare_job(args)
    state = job.train().state
    kept = sorted(path for path in tmp_path.glob("adapters/**/*") if path.is_file())
    listed = [FileFacts(path.relative_to(tmp_path).as_posix(), _digest(path), path.stat().st_size) for path in kept]

    def read(file: FileFacts, at: int) -> bytes:
        return (tmp_path / file.path).read_bytes()[at:]

    evaluator = Evaluator(tmp_path / "evaluations", lambda: job.session.device.info.index)
    bare = {name: value for name, value in options.items() if name not in heldout}
    try:
        for _ in range(2):  # the process stays
            found = evaluator.measure("r", Task("a", options, ""), listed, read)
            assert found["step"] == state.step == 2
            assert found["loss"] == pytest.approx(state.last_eval_loss, rel=1e-5)
        with pytest.raises(UserError, match="has no held-out rows"):
            evaluator.measure("r", Task("a", bare, ""), listed, read)
    finally:
        evaluator.rest()
    assert not list((tmp_path / "evaluations").glob("*/*"))


def _digest(path: Path) -> str:
    from wgpu_lora.atomic import file_digest

    return file_digest(path)


def test_evaluations_are_written_beside_results(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    lines = [{"task": name, "step": 5, "eval_loss": 2.0, "time": 1.0} for name in ("a", "b")]
    cluster = FakeCluster(evaluations=lines)
    tasks = [task_view(name, "finished", output=str(tmp_path / name)) for name in ("a", "b")]
    write_evaluations(cluster, "r", tasks)
    assert json.loads((tmp_path / "a/evaluations.jsonl").read_text()) == {"step": 5, "eval_loss": 2.0, "time": 1.0}
    assert not (tmp_path / "b").exists()  # its result is not here
