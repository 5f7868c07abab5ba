"""The coordinator in Ray: runs end with their results, whatever is killed meanwhile."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from support.units import task

from wgpu_lora.cluster.messages import RunRequest, RunRequirements, Snapshot, Task, TaskView, from_plain, to_plain

LEASE = 30.0
STEPS = 40


class Cluster:
    """A Ray of one node with a coordinator."""

    def __init__(self) -> None:
        from wgpu_lora.cluster.coordinator.start import coordinator
        from wgpu_lora.cluster.node.start import device, host

        self.node = ray.get_runtime_context().get_node_id()
        self.handle = coordinator()
        ((known),) = self.ask("nodes")
        self.facts = known["devices"][0]
        self.host = host(self.node)
        self.device = lambda: device(self.node, self.facts["key"])

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the coordinator, which may be starting again."""
        end = time.monotonic() + 60
        while True:
            try:
                return ray.get(getattr(self.handle, method).remote(*arguments), timeout=60)
            except ray.exceptions.RayActorError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.5)

    def submit(self, name: str, tasks: list[Task], **more: Any) -> None:
        plans = ray.get(self.host.plan.remote([to_plain(one) for one in tasks], self.facts["index"]), timeout=120)
        found = {
            one: {self.facts["plan_class"]: from_plain(RunRequirements, plan)} for one, plan in plans["tasks"].items()
        }
        asked = to_plain(RunRequest(name, tasks, found, mirror_steps=2, **more))
        assert self.ask("submit", asked) == {"run": name}
        assert self.ask("submit", asked) == {"run": name}  # the first answer may have been lost

    def snapshot(self, run: str) -> Snapshot:
        return from_plain(Snapshot, self.ask("snapshot", run))

    def until(self, run: str, true: Callable[[list[TaskView]], Any], seconds: float = 180) -> list[TaskView]:
        """The tasks of a run once that is true of them."""
        end = time.monotonic() + seconds
        while not true(seen := self.snapshot(run).tasks):
            assert time.monotonic() < end, (seen, self.snapshot(run).events[-10:])
            time.sleep(0.3)
        return seen

    def over(self, run: str) -> list[TaskView]:
        ended = ("finished", "stopped", "failed", "cancelled")
        return self.until(run, lambda tasks: all(one.state in ended for one in tasks))

    def log(self, run: str, name: str) -> list[dict[str, Any]]:
        """The lines of the log of a task's result, as a driver fetches it."""
        (found,) = [one for one in self.ask("results", run) if one["task"] == name]
        assert {"adapter_model.safetensors", "run.json", "log.jsonl"} <= {file["path"] for file in found["files"]}
        path = f"adapters/{name}/log.jsonl"
        data = ray.get(self.host.read.remote(found["unit"], found["digest"], path, 0), timeout=30)
        return [json.loads(line) for line in data.splitlines()]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    short = tempfile.TemporaryDirectory(prefix="wl-", ignore_cleanup_errors=True)  # sockets have short paths
    with short as place, pytest.MonkeyPatch.context() as patch:
        patch.setenv("WGPU_LORA_CLUSTER_DIR", str(tmp_path_factory.mktemp("cluster")))
        patch.setenv("WGPU_LORA_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("WGPU_LORA_CLUSTER_LEASE", str(LEASE))
        patch.setenv("PYTHONPATH", os.pathsep.join(str(Path(__file__).parents[up]) for up in (3, 2)))
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            _temp_dir=place,
            object_store_memory=100_000_000,
            namespace="tests",
            log_to_driver=False,
        )
        try:
            yield Cluster()
        finally:
            ray.shutdown()


def steps(lines: list[dict[str, Any]]) -> list[int]:
    return [line["step"] for line in lines if line.get("event") == "step" or ("loss" in line and "step" in line)]


def test_a_run_ends_with_results_that_can_be_fetched(cluster: Cluster, tmp_path: Path) -> None:
    cluster.submit("plain", [task("one", tmp_path, max_steps=4), task("two", tmp_path, max_steps=6)])
    seen = {view.name: view for view in cluster.over("plain")}
    assert {name: view.state for name, view in seen.items()} == {"one": "finished", "two": "finished"}
    assert {name: view.progress.step for name, view in seen.items()} == {"one": 4, "two": 6}
    for name in seen:
        assert not seen[name].fetched
        cluster.log("plain", name)
        cluster.ask("fetched", "plain", name)
    assert cluster.ask("results", "plain") == []
    after = cluster.snapshot("plain")
    assert after.runs[0].over
    assert after.devices[0].facts.speed  # it decides whether the two are joined


def test_a_killed_coordinator_goes_on_and_writes_to_the_shared_folder(cluster: Cluster, tmp_path: Path) -> None:
    tasks = [task("one", tmp_path, max_steps=STEPS, num_train_epochs=1000)]
    cluster.submit("restart", tasks, shared=str(tmp_path))
    cluster.until("restart", lambda tasks: tasks[0].progress.step > 2)
    ray.kill(cluster.handle, no_restart=False)
    (seen,) = cluster.until("restart", lambda tasks: tasks[0].fetched)
    assert (seen.state, seen.attempts, seen.progress.step) == ("finished", 1, STEPS)
    assert (tmp_path / "one" / "adapter_model.safetensors").is_file()
    cluster.submit("restart", [task("two", tmp_path, max_steps=2)])  # the name is free again
    cluster.ask("cancel", "restart", None)
    assert cluster.over("restart")[0].state == "cancelled"


def test_a_killed_device_costs_the_steps_since_the_last_copy(cluster: Cluster, tmp_path: Path) -> None:
    cluster.submit("lost", [task("one", tmp_path, max_steps=STEPS, num_train_epochs=1000, logging_steps=1)])
    cluster.until("lost", lambda tasks: tasks[0].progress.step > 4)
    os.kill(ray.get(cluster.device().pid.remote(), timeout=30), signal.SIGKILL)
    (seen,) = cluster.over("lost")
    assert (seen.state, seen.attempts) == ("finished", 2)
    assert steps(cluster.log("lost", "one")) == list(range(1, STEPS + 1))
    cluster.ask("fetched", "lost", "one")


def test_cancelling_keeps_the_last_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    cluster.submit("cancelled", [task("one", tmp_path, max_steps=2000, num_train_epochs=1000)])
    cluster.until("cancelled", lambda tasks: tasks[0].progress.step > 2)
    assert cluster.ask("cancel", "cancelled", None) == {}
    (seen,) = cluster.over("cancelled")
    assert seen.state == "cancelled"
    (found,) = cluster.ask("results", "cancelled")
    assert any(file["path"].startswith("checkpoints/") for file in found["files"])
    cluster.ask("fetched", "cancelled", "one")


def test_what_is_wrong_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    assert "No run 'nowhere'" in cluster.ask("cancel", "nowhere", None)["refused"]
    assert "quarantined" in cluster.ask("release", "nowhere")["refused"]
    assert "not valid" in cluster.ask("submit", {"name": 1})["refused"]
    one = task("one", tmp_path)
    far = {"one": {self_class: RunRequirements(1 << 60) for self_class in (cluster.facts["plan_class"],)}}
    refused = cluster.ask("submit", to_plain(RunRequest("far", [one], far)))["refused"]
    assert "device memory" in refused
    assert cluster.ask("retire")["running"] == 0
