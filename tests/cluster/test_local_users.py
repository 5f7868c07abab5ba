"""Ray of this user here: who uses it, when it ends, and what a start that was killed has left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from support.fake_cluster import FakeCluster, snapshot, task_view

from wgpu_lora.cli.cluster import running
from wgpu_lora.cluster import local_ray
from wgpu_lora.cluster.cluster_connection import Target
from wgpu_lora.cluster.cluster_file import RunOptions
from wgpu_lora.cluster.local_ray import Local, end_unused, using
from wgpu_lora.cluster.messages import RunRequest, Sweep, Task
from wgpu_lora.cluster.node_processes import MARK
from wgpu_lora.errors import UserError
from wgpu_lora.json_files import to_json
from wgpu_lora.process_identity import boot_id

USER = """
from wgpu_lora.cluster.local_ray import using
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
def ray(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Local:
    """One that answers, though no process runs."""
    place = tmp_path / "wgl-x"
    place.mkdir()
    (place / "token").write_text("t")
    made = Local("127.0.0.1:1", str(place), boot_id())
    (state / "local.json").write_text(to_json(asdict(made)))
    monkeypatch.setattr(Local, "alive", lambda self: Path(self.place).is_dir())
    monkeypatch.setattr(local_ray, "_answers", lambda one: True)
    return made


def another() -> subprocess.Popen[str]:
    """A program that uses it."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", USER], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout
    assert process.stdout.readline() == "using\n"
    return process


def test_the_last_program_ends_it(ray: Local) -> None:
    with using():
        process = another()
        end_unused(lambda: True)
        assert local_ray.running_ray() == ray
        process.communicate("\n")
        end_unused(lambda: False)
        assert local_ray.running_ray() == ray
        end_unused(lambda: True)
    assert local_ray.running_ray() is None
    assert not Path(ray.place).exists()


def test_a_killed_program_counts_no_more(ray: Local) -> None:
    process = another()
    process.kill()
    process.wait()
    with using():
        end_unused(lambda: True)
    assert local_ray.running_ray() is None


def test_a_start_that_was_killed_leaves_no_process(state: Path, tmp_path: Path) -> None:
    place = tmp_path / "wgl-y"
    place.mkdir()
    (place / "token").write_text("t")
    began = Local("", str(place), boot_id())
    (state / "local.json").write_text(to_json(asdict(began)))
    with subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: f"{began.mark}/1"}) as process:
        assert local_ray.running_ray() is None
        assert process.wait(60) != 0
    assert not place.exists()


def test_a_clock_that_is_set_ends_no_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    living = Local("127.0.0.1:1", str(tmp_path / "wgl-z"), boot_id())
    monkeypatch.setattr(local_ray.node_processes, "running", lambda mark: "1")
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(psutil, "boot_time", lambda: 86400.0)  # which is computed from the clock
    assert living.alive()
    assert not replace(living, boot="another start of the machine").alive()


def test_a_state_directory_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(local_ray.DIRECTORY, str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot be used"):
        local_ray.running_ray()


@pytest.mark.parametrize(("joined", "over", "stays"), [(False, False, False), (True, False, True), (True, True, False)])
def test_a_refused_run_ends_what_nobody_else_uses(
    ray: Local, monkeypatch: pytest.MonkeyPatch, joined: bool, over: bool, stays: bool
) -> None:
    join = local_ray.start_ray

    def refused(*arguments: object) -> str:
        if joined:  # by another program, which has left already
            assert join(dict) == (ray, False)
        raise UserError("The run is refused.")

    monkeypatch.setattr(local_ray, "start_ray", lambda resources, dashboard: (ray, True))
    monkeypatch.setattr(running, "connected", lambda what: nullcontext())
    monkeypatch.setattr(running, "_request", refused)
    monkeypatch.setattr(running, "_all_done", lambda cluster: over)
    with pytest.raises(UserError, match="is refused"):
        running.run_tasks(Target(here=True), [], RunOptions())
    assert (local_ray.running_ray() is not None) == stays


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_submission_leaves_the_accepted_run(
    ray: Local, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    class Accepting:
        def controller(self, method: str, *arguments: object, seconds: float) -> str:
            assert method == "submit"
            signal.raise_signal(number)
            return "mine"

    def ended(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, ended)  # as a program that is told to end leaves its blocks
    monkeypatch.setattr(local_ray, "start_ray", lambda resources, dashboard: (ray, True))
    monkeypatch.setattr(running, "connected", lambda what: nullcontext(Accepting()))
    monkeypatch.setattr(running, "_request", lambda *given: RunRequest("mine", [], {}))
    try:
        with pytest.raises(KeyboardInterrupt):
            running.run_tasks(Target(here=True), [], RunOptions())
    finally:
        signal.signal(number, before)
    assert local_ray.running_ray() == ray
    said = capsys.readouterr().out
    assert "mine is accepted, and goes on" in said
    assert "cluster attach mine --local" in said
    assert "cluster cancel mine --local" in said


def test_a_sweep_json_that_cannot_be_written_leaves_no_ray(
    ray: Local, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sweep.json").mkdir()
    done = snapshot(task_view("a", "finished", 10, output=str(tmp_path / "a"), fetched=True), over=True)
    swept = replace(done, runs=[replace(done.runs[0], sweep=Sweep("loss"))])
    with pytest.raises(UserError, match=r"sweep\.json cannot be written \(.*\): mend that for other sweeps"):
        running.follow_run(FakeCluster(snapshots=[swept]), Target(here=True), "r", fetches=True)
    assert local_ray.running_ray() is None


def test_data_is_looked_for_before_ray_is_started(tmp_path: Path) -> None:
    lacking = Task("a", {"data": str(tmp_path / "no.jsonl")}, str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"no\.jsonl of a cannot be used, since it does not exist"):
        running.run_tasks(Target(here=True), [lacking], RunOptions())
    assert local_ray.running_ray() is None
