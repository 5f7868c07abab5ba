"""The controller in Ray: runs end with their results, whatever is killed meanwhile."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import ray
from support.cli import QWEN2, SMALL, write_rows
from support.cluster.hosts import WAIT, until

from wgpu_lora.cluster.cluster_connection import Cluster
from wgpu_lora.cluster.messages import (
    NAMESPACE,
    RunRequest,
    RunRequirements,
    Snapshot,
    Task,
    TaskView,
    from_plain,
)
from wgpu_lora.errors import UserError

STEPS = 40


def task(name: str, directory: Path, **options: Any) -> Task:
    """A task of a few steps on few rows."""
    rows = directory / f"{name}.jsonl"
    if not rows.exists():
        write_rows(rows)
    options = {**SMALL, "model": QWEN2, "data": str(rows), "run_log": False, **options}
    return Task(name, options, str(directory / name))


class Lab:
    """A Ray of one node with a controller."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        (self.node,) = until(lambda: cluster.controller("nodes", seconds=WAIT))  # starts the controller and the host
        (self.device,) = self.node["devices"]

    def call(self, method: str, *arguments: Any) -> Any:
        return self.cluster.controller(method, *arguments)

    def submit(self, name: str, tasks: Sequence[Task], **more: Any) -> None:
        jobs = [{"name": entry.name, "options": entry.options} for entry in tasks]
        plans = self.cluster.host(self.node["id"], "plan", jobs, self.device["index"], False, False, seconds=WAIT)
        by_class = {
            task_name: {self.device["plan_class"]: from_plain(RunRequirements, plan)}
            for task_name, plan in plans["tasks"].items()
        }
        request = asdict(RunRequest(name, list(tasks), by_class, mirror_steps=2, **more))
        assert self.call("submit", request) == name
        assert self.call("submit", request) == name  # the first answer may have been lost

    def snapshot(self, run: str) -> Snapshot:
        return from_plain(Snapshot, self.call("snapshot", run))

    def until(self, run: str, true: Callable[[list[TaskView]], Any]) -> list[TaskView]:
        """The tasks of a run once that is true of them."""
        end = time.monotonic() + WAIT
        while not true(tasks := self.snapshot(run).tasks):
            assert time.monotonic() < end, (tasks, self.snapshot(run).events[-10:])
            time.sleep(0.3)
        return tasks

    def over(self, run: str) -> list[TaskView]:
        ended = ("finished", "stopped", "failed", "cancelled")
        return self.until(run, lambda tasks: all(entry.state in ended for entry in tasks))

    def log(self, run: str, name: str) -> list[dict[str, Any]]:
        """The lines of the log of a task's result, as a driver fetches it."""
        (result,) = [entry for entry in self.call("results", run) if entry["task"] == name]
        files = {file["path"]: file["digest"] for file in result["files"]}
        assert {"adapter_model.safetensors", "run.json", "log.jsonl"} <= files.keys()
        data = self.cluster.host(result["nodes"][0], "piece", result["unit"], files["log.jsonl"], 0)
        return [json.loads(line) for line in data.splitlines()]

    def actor_pid(self, run: str, name: str, generation: int = 1) -> int:
        actor = ray.get_actor(f"train:{run}/{name}:{generation}", namespace=NAMESPACE)
        return int(ray.get(actor.pid.remote(), timeout=WAIT))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    short = tempfile.TemporaryDirectory(prefix="wl-", ignore_cleanup_errors=True)  # sockets have short paths
    with short as place, pytest.MonkeyPatch.context() as patch:
        patch.setenv("WGPU_LORA_CLUSTER_DIR", str(tmp_path_factory.mktemp("cluster")))
        patch.setenv("WGPU_LORA_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("PYTHONPATH", os.pathsep.join(str(Path(__file__).parents[up]) for up in (3, 2)))
        ray.init(num_cpus=1, include_dashboard=False, _temp_dir=place, object_store_memory=100_000_000,
                 log_to_driver=False, namespace=NAMESPACE)  # fmt: skip
        cluster = Cluster.__new__(Cluster)  # this process has joined already
        try:
            yield Lab(cluster)
        finally:
            ray.shutdown()


def steps(lines: list[dict[str, Any]]) -> list[int]:
    return [line["step"] for line in lines if "loss" in line and "step" in line]


def test_a_run_ends_with_results_that_can_be_fetched(lab: Lab, tmp_path: Path) -> None:
    lab.submit("plain", [task("one", tmp_path, max_steps=4), task("two", tmp_path, max_steps=6)])
    tasks = {view.name: view for view in lab.over("plain")}
    assert {name: view.state for name, view in tasks.items()} == {"one": "finished", "two": "finished"}
    assert {name: view.progress.step for name, view in tasks.items()} == {"one": 4, "two": 6}
    for name in tasks:
        assert not tasks[name].fetched
        lab.log("plain", name)
        lab.call("fetched", "plain", name)
    assert lab.call("results", "plain") == []
    after = lab.snapshot("plain")
    assert after.runs[0].over
    assert after.devices[0].facts.speed  # it decides whether the two are joined


def test_a_killed_controller_goes_on_and_results_go_to_the_shared_folder(lab: Lab, tmp_path: Path) -> None:
    tasks = [task("one", tmp_path, max_steps=STEPS, num_train_epochs=1000)]
    lab.submit("restart", tasks, shared=str(tmp_path))
    lab.until("restart", lambda tasks: tasks[0].progress.step > 2)
    ray.kill(ray.get_actor("run-controller", namespace=NAMESPACE), no_restart=False)
    (view,) = lab.until("restart", lambda tasks: tasks[0].fetched)
    assert (view.state, view.attempts, view.progress.step) == ("finished", 1, STEPS)
    assert (tmp_path / "one" / "adapter_model.safetensors").is_file()
    lab.submit("restart", [task("two", tmp_path, max_steps=2)])  # the name is free again
    lab.call("cancel", "restart", None)
    assert lab.over("restart")[0].state == "cancelled"


def test_a_hanging_actor_costs_the_steps_since_the_last_checkpoint(lab: Lab, tmp_path: Path) -> None:
    last = 500  # 8 seconds: the run must not end before the signal arrives
    lab.submit("lost", [task("one", tmp_path, max_steps=last, num_train_epochs=1000, logging_steps=1, save_steps=100)])
    lab.until("lost", lambda tasks: tasks[0].progress.step > 4)
    os.kill(lab.actor_pid("lost", "one"), signal.SIGSTOP)
    (view,) = lab.over("lost")
    assert (view.state, view.attempts) == ("finished", 2)
    assert steps(lab.log("lost", "one")) == list(range(1, last + 1))
    lab.call("fetched", "lost", "one")


def test_cancelling_keeps_the_last_checkpoint(lab: Lab, tmp_path: Path) -> None:
    lab.submit("cancelled", [task("one", tmp_path, max_steps=2000, num_train_epochs=1000)])
    lab.until("cancelled", lambda tasks: tasks[0].progress.step > 2)
    lab.call("cancel", "cancelled", None)
    (view,) = lab.over("cancelled")
    assert view.state == "cancelled"
    (result,) = lab.call("results", "cancelled")
    assert any(file["path"].startswith("checkpoints/") for file in result["files"])
    lab.call("fetched", "cancelled", "one")


def test_wrong_requests_are_refused(lab: Lab, tmp_path: Path) -> None:
    single = task("one", tmp_path)
    far = {"one": {lab.device["plan_class"]: RunRequirements(1 << 60)}}
    for words, method, arguments in (
        ("No run 'nowhere'", "cancel", ("nowhere",)),
        ("quarantined", "release", ("nowhere",)),
        ("not valid", "submit", ({"name": 1},)),
        ("device memory", "submit", (asdict(RunRequest("far", [single], far)),)),
    ):
        with pytest.raises(UserError, match=words):
            lab.call(method, *arguments)
