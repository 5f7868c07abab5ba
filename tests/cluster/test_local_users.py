"""Ray of this user here: who uses it, when it ends, and what a start that was killed has left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from support.cluster.fake_cluster import FakeCluster, snapshot, task_view

from wgpu_lora.cli.cluster import run_driver
from wgpu_lora.cluster.cluster_connection import Target
from wgpu_lora.cluster.cluster_file import RunOptions, SweepOptions
from wgpu_lora.cluster.launch import local_ray
from wgpu_lora.cluster.launch.local_ray import LocalRay, end_unused, using
from wgpu_lora.cluster.launch.node_processes import MARK
from wgpu_lora.cluster.messages import RunRequest, Snapshot, Task
from wgpu_lora.errors import UserError

USER = """
from wgpu_lora.cluster.launch.local_ray import using
with using():
    print("using", flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(local_ray.DIRECTORY, str(tmp_path / "state"))
    monkeypatch.setenv("WGPU_LORA_CLUSTER_DIR", str(tmp_path / "cluster"))
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


@pytest.fixture
def ray(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalRay:
    """One that runs, though it has no process."""
    directory = tmp_path / "wgl-x"
    directory.mkdir()
    (directory / "token").write_text("t")
    (state / local_ray.RECORD).write_text(str(directory))
    monkeypatch.setattr(LocalRay, "alive", lambda self: self.directory.is_dir())
    return LocalRay(directory)


def start_sleep() -> subprocess.Popen[str]:
    """A program that uses it."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", USER], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout
    assert process.stdout.readline() == "using\n"
    return process


def test_the_last_program_ends_it(ray: LocalRay) -> None:
    with using():
        process = start_sleep()
        end_unused(lambda: True)
        assert local_ray.running_ray() == ray
        process.communicate("\n")
        end_unused(lambda: False)
        assert local_ray.running_ray() == ray
        end_unused(lambda: True)
    assert local_ray.running_ray() is None
    assert not ray.directory.exists()


def test_a_killed_program_counts_no_more(ray: LocalRay) -> None:
    process = start_sleep()
    process.kill()
    process.wait()
    with using():
        end_unused(lambda: True)
    assert local_ray.running_ray() is None


def test_a_start_that_was_killed_leaves_no_process(state: Path, tmp_path: Path) -> None:
    instance = LocalRay(tmp_path / "wgl-y")
    instance.directory.mkdir()
    (instance.directory / "token").write_text("t")
    (state / local_ray.RECORD).write_text(str(instance.directory))
    with subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: f"{instance.mark}/1"}) as process:
        assert local_ray.running_ray() is None
        assert process.wait(60) != 0
    assert not instance.directory.exists()
    assert not (state / local_ray.RECORD).exists()


def test_a_state_directory_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(local_ray.DIRECTORY, str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot be used"):
        local_ray.running_ray()


GOING = snapshot(task_view("a"))
DONE = snapshot(task_view("a", "finished", 10, fetched=True), over=True)


@pytest.mark.parametrize(("cluster_snapshot", "stays"), [(DONE, False), (GOING, True)])
def test_a_refused_run_ends_what_nobody_else_uses(
    ray: LocalRay, monkeypatch: pytest.MonkeyPatch, cluster_snapshot: Snapshot, stays: bool
) -> None:
    def refused(*arguments: object) -> str:
        raise UserError("The run is refused.")

    monkeypatch.setattr(run_driver, "connected", lambda where: nullcontext(FakeCluster(snapshots=[cluster_snapshot])))
    monkeypatch.setattr(run_driver, "_request", refused)
    with pytest.raises(UserError, match="is refused"):
        run_driver.run_tasks(Target(local=True), [], RunOptions())
    assert (local_ray.running_ray() is not None) == stays


@pytest.mark.parametrize("fresh", [True, False])
def test_a_ray_that_cannot_be_joined_is_ended_if_it_was_started_now(
    ray: LocalRay, monkeypatch: pytest.MonkeyPatch, fresh: bool
) -> None:
    def connected(where: Target) -> None:
        raise UserError("The cluster cannot be joined.")

    monkeypatch.setattr(local_ray, "start_ray", lambda resources, dashboard: (ray, fresh))
    monkeypatch.setattr(run_driver, "connected", connected)
    with pytest.raises(UserError, match="cannot be joined"):
        run_driver.run_tasks(Target(local=True), [], RunOptions())
    assert (local_ray.running_ray() is None) == fresh


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_submission_leaves_the_accepted_run(
    ray: LocalRay, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    class Accepting(FakeCluster):
        def _submit(self, request: object) -> str:
            signal.raise_signal(number)
            return "mine"

    def ended(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, ended)  # as a program that is told to end leaves its blocks
    monkeypatch.setattr(run_driver, "connected", lambda where: nullcontext(Accepting(snapshots=[GOING])))
    monkeypatch.setattr(run_driver, "_request", lambda *arguments: RunRequest("mine", [], {}))
    try:
        with pytest.raises(KeyboardInterrupt):
            run_driver.run_tasks(Target(local=True), [], RunOptions())
    finally:
        signal.signal(number, before)
    assert local_ray.running_ray() == ray
    out = capsys.readouterr().out
    assert "mine is accepted, and goes on" in out
    assert "cluster attach mine --local" in out
    assert "cluster cancel mine --local" in out


def test_a_sweep_json_that_cannot_be_written_leaves_no_ray(
    ray: LocalRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sweep.json").mkdir()
    task = replace(DONE.tasks[0], output=str(tmp_path / "a"))
    swept = replace(DONE, tasks=[task], runs=[replace(DONE.runs[0], sweep=SweepOptions(metric="loss"))])
    monkeypatch.setattr(run_driver, "connected", lambda where: nullcontext(FakeCluster(snapshots=[swept])))
    with pytest.raises(UserError, match=r"sweep\.json cannot be written \(.*\): mend that for other sweeps"):
        run_driver.attach_to(Target(local=True), "r")
    assert local_ray.running_ray() is None


def test_data_is_looked_for_before_ray_is_started(tmp_path: Path) -> None:
    lacking = Task("a", {"data": str(tmp_path / "no.jsonl")}, str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"no\.jsonl of a cannot be used, since it does not exist"):
        run_driver.run_tasks(Target(local=True), [lacking], RunOptions())
    assert local_ray.running_ray() is None
