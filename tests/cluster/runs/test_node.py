"""The actors of a node in Ray: they train, copy, resume, and leave no process when they are killed."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from support.units import newer, order, task

from wgpu_lora.cluster.facts import COORDINATOR, NAMESPACE, Answer, Copy, Order, Report, from_plain, to_plain

FINE = to_plain(Answer())


@ray.remote(num_cpus=0)
class Fake:
    """A coordinator that keeps reports, and answers all alike."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []
        self.answer = dict(FINE)

    def report(self, report: dict[str, Any]) -> dict[str, Any]:
        self.said.append(report)
        return self.answer

    def reports(self) -> list[dict[str, Any]]:
        return self.said

    def set(self, **answer: Any) -> None:
        self.answer = {**FINE, **answer}


class Cluster:
    """A Ray of one node, its coordinator, host and device."""

    def __init__(self, fake: Any, node: str):
        from wgpu_lora.cluster.node.start import device, host

        self.fake, self.node = fake, node
        self.host = host(node)
        (self.facts, *_) = ray.get(self.host.survey.remote(), timeout=120)["devices"]
        self.device = device(node, self.facts["key"])

    def start(self, given: Order) -> None:
        assert ray.get(self.device.start.remote(to_plain(given)), timeout=60) == {}

    def until(self, true: Callable[[Report], Any], seconds: float = 120) -> Report:
        """The first report for which that is true."""
        end, seen = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            said = ray.get(self.fake.reports.remote(), timeout=30)
            for report in said[seen:]:
                if true(from_plain(Report, report)):
                    return from_plain(Report, report)
            seen = len(said)
            time.sleep(0.2)
        raise AssertionError(f"no such report in {seconds} s, the last one was {said[-1:]}")

    def held(self, unit: str) -> Copy:
        return from_plain(Copy, ray.get(self.host.held.remote(unit), timeout=30))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    short = tempfile.TemporaryDirectory(prefix="wl-", ignore_cleanup_errors=True)  # sockets have short paths
    with short, pytest.MonkeyPatch.context() as patch:
        patch.setenv("WGPU_LORA_CLUSTER_DIR", str(tmp_path_factory.mktemp("cluster")))
        path = os.pathsep.join([str(Path(__file__).parents[3]), str(Path(__file__).parents[2])])
        patch.setenv("PYTHONPATH", path)
        patch.setenv("RAY_raylet_start_wait_time_s", "120")  # a busy machine takes more than Ray's 30 s
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            _temp_dir=short.name,
            object_store_memory=100_000_000,
            namespace="tests",
            log_to_driver=False,
        )
        try:
            fake = Fake.options(name=COORDINATOR, namespace=NAMESPACE).remote()
            yield Cluster(fake, ray.get_runtime_context().get_node_id())
        finally:
            ray.shutdown()


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def gone(processes: list[psutil.Process], seconds: float = 10) -> bool:
    return not psutil.wait_procs(processes, seconds)[1]


def test_a_task_from_order_to_results(cluster: Cluster, tmp_path: Path) -> None:
    given = order(task("whole", tmp_path, max_steps=4))
    cluster.start(given)
    last = cluster.until(lambda report: report.unit == given.unit and report.ended)
    assert last.ended == "done", last
    copy = cluster.held(given.unit)
    assert copy.final
    assert copy.steps == {"whole": 4}
    target = tmp_path / "shared" / "whole"
    published = cluster.host.publish.remote(given.unit, copy.digest, "whole", str(target))
    files = {file["path"] for file in ray.get(published, timeout=60)}
    assert {"adapter_model.safetensors", "run.json", "log.jsonl", "README.md"} <= files
    listed = ray.get(cluster.host.results.remote(given.unit, copy.digest, "whole"), timeout=30)
    for file in listed:
        path = f"adapters/whole/{file['path']}"
        data = ray.get(cluster.host.read.remote(given.unit, copy.digest, path, 0), timeout=30)
        assert data == (target / file["path"]).read_bytes()
    assert "refused" in ray.get(cluster.host.read.remote(given.unit, copy.digest, "../../x", 0), timeout=30)
    ray.get(cluster.host.forget.remote(given.run), timeout=30)
    assert ray.get(cluster.host.held.remote(given.unit), timeout=30) is None


def test_a_killed_worker_resumes_from_its_newest_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    given = order(task("killed", tmp_path, max_steps=2000, num_train_epochs=1000))
    cluster.start(given)
    mine = lambda report: report.unit == given.unit  # noqa: E731
    cluster.until(lambda report: mine(report) and report.copy)
    (worker,) = children(ray.get(cluster.device.pid.remote(), timeout=30))[:1]
    worker.kill()
    last = cluster.until(lambda report: mine(report) and report.ended)
    assert last.ended == "killed"
    copy = cluster.held(given.unit)
    assert copy.steps["killed"] == last.saved["killed"] >= 2
    again = newer(given, restore=copy.digest, restore_from=cluster.node)
    cluster.start(again)
    resumed = copy.steps["killed"]
    first = cluster.until(lambda report: mine(report) and report.epoch == 2 and report.progress["killed"].step)
    assert first.progress["killed"].step >= resumed
    cluster.until(lambda report: mine(report) and report.epoch == 2 and report.progress["killed"].step > resumed)
    try:
        ray.get(cluster.fake.set.remote(cancel=True))
        last = cluster.until(lambda report: mine(report) and report.epoch == 2 and report.ended)
    finally:
        ray.get(cluster.fake.set.remote())
    assert last.ended == "stopped"
    assert cluster.held(given.unit).final
    assert cluster.held(given.unit).steps["killed"] > resumed


def test_a_killed_device_leaves_no_process_and_an_intact_shelf(cluster: Cluster, tmp_path: Path) -> None:
    from wgpu_lora.cluster.node.start import device

    given = order(task("orphan", tmp_path, max_steps=2000, num_train_epochs=1000))
    cluster.start(given)
    cluster.until(lambda report: report.unit == given.unit and report.copy)
    pid = ray.get(cluster.device.pid.remote(), timeout=30)
    processes = children(pid)
    assert processes
    os.kill(pid, signal.SIGKILL)
    assert gone(processes)
    copy = cluster.held(given.unit)
    assert copy.steps["orphan"] >= 2
    time.sleep(1)  # Ray forgets the name
    with suppress(ray.exceptions.RayActorError):  # which is as it should be, too: its name is still the dead one's
        cluster.device = device(cluster.node, cluster.facts["key"])
        assert ray.get(cluster.device.work.remote(), timeout=60) == []
