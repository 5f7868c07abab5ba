"""`wgpu-lora cluster run --local` with Ray, from beginning to end: detaching, coming back, cancelling."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cli import QWEN2, ROWS, flags, write_rows
from support.cluster.hosts import WAIT

from wgpu_lora.cluster.launch import local_ray as local

SMALL = {"model": QWEN2, "max_length": 16, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}


class Commands:
    """Commands of one user with a Ray of their own."""

    def __init__(self, place: Path):
        self.place = place
        shares = {name: str(place / name) for name in ("DATA", "SHARE", "CACHE")}
        self.environment = {
            **os.environ,
            **{f"WGPU_LORA_{name}_DIR": path for name, path in shares.items()},
            "WGPU_LORA_CLUSTER_DIR": str(place / "cluster"),
            local.DIRECTORY: str(place / "state"),
            "WGPU_LORA_NO_RUN_LOG": "1",
        }
        self.environment.pop("RAY_ADDRESS", None)

    def start(self, *arguments: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "wgpu_lora", "cluster", *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env=self.environment, cwd=self.place, text=True, **pipes)

    def run(self, *arguments: Any, code: int = 0) -> str:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=WAIT)
        assert process.returncode == code, out + err
        return out + err

    def status(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self.run("status", "--local", "--json"))
        return report


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Commands]:
    monkeypatch.setenv(local.DIRECTORY, str(tmp_path / "state"))
    instance = Commands(tmp_path)
    write_rows(tmp_path / "rows.jsonl", ROWS)
    try:
        yield instance
    finally:
        local.end_local()


def until(process: subprocess.Popen[str], words: str) -> str:
    """What a command prints up to a line with these words."""
    assert process.stdout
    output = ""
    for line in process.stdout:
        output += line
        if words in line:
            return output
    raise AssertionError(output + (process.stderr.read() if process.stderr else ""))


def test_a_run_leaves_its_result_and_no_process(commands: Commands) -> None:
    place = commands.place
    output = commands.run("run", "--local", *flags(**SMALL, data="rows.jsonl", output="out/a", max_steps=3, name="one"))
    assert "finished" in output
    record = json.loads((place / "out/a/run.json").read_text())
    assert record["stop_reason"] == "max steps"
    assert (place / "out/a/adapter_model.safetensors").is_file()
    assert not [path for path in (place / "out").iterdir() if path.name.startswith(".")]
    assert local.running_ray() is None
    assert not (place / "state" / local.RECORD).exists()


def test_jobs_go_on_without_a_driver(commands: Commands) -> None:
    # One pipeline, whatever is measured: on one device, the second would else wait for an endless run.
    adapters = ["--join", "always", "--adapters", "rows.jsonl:out/a", "--adapters", "rows.jsonl:out/b"]
    endless = flags(**SMALL, max_steps=1_000_000, save_steps=20, mirror_steps=20, name="long")
    driver = commands.start("run", "--local", *adapters, *endless)
    until(driver, "running")
    driver.send_signal(signal.SIGINT)
    out, err = driver.communicate(timeout=WAIT)
    assert driver.returncode == 128 + signal.SIGINT, out + err
    assert "cluster attach long --local" in out
    assert "cluster cancel long --local" in out

    before = {task["name"]: task["progress"]["step"] for task in commands.status()["tasks"]}
    assert set(before) == {"a", "b"}
    limit = time.monotonic() + WAIT
    while any(task["progress"]["step"] <= before[task["name"]] for task in commands.status()["tasks"]):
        assert time.monotonic() < limit, "nobody trains without the driver"

    # a second run beside the first, which is refused before anything runs
    refused = commands.run("run", "--local", *flags(**SMALL, data="no.jsonl", output="out/c", max_steps=2), code=2)
    assert "no.jsonl" in refused

    killed = commands.start("attach", "--local")
    until(killed, "running")
    killed.kill()
    killed.communicate(timeout=WAIT)
    commands.run("cancel", "long", "--local")
    output = commands.run("attach", "long", "--local", code=1)
    assert output.count("cancelled") >= 2
    for name in ("a", "b"):  # what was trained until then is here, and can be continued
        assert list((commands.place / "out" / name).rglob("adapter_model.safetensors"))
    assert local.running_ray() is None


def test_other_machines_reach_nothing(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "f" * 64)  # of another cluster; Ray takes it before that of a file
    commands.environment["RAY_AUTH_TOKEN"] = "f" * 64
    running, _ = local.start_ray(lambda: {"webgpu:x": 1})
    assert commands.status()["nodes"][0]["address"] == local.HERE  # the controller and the host's actor run
    from wgpu_lora.cluster.launch import node_processes as processes

    listeners = processes.listening(running.mark)
    assert {"gcs_server", "raylet", "ray.util.client.server", "ray::RunController"} <= {
        listener["process"] for listener in listeners
    }
    assert {listener["address"] for listener in listeners} == {local.HERE}


def test_a_ray_that_was_killed_is_forgotten(commands: Commands) -> None:
    running, fresh = local.start_ray(lambda: {"webgpu:x": 1})
    assert fresh
    assert oct(Path(running.directory, "token").stat().st_mode)[-3:] == "600"
    assert local.start_ray(dict) == (running, False)
    from wgpu_lora.cluster.launch import node_processes as processes

    for process in processes.of_cluster(running.mark).values():
        process.kill()
    output = commands.run("status", "--local", code=2)
    assert "Ray does not run on this machine" in output
    assert not Path(running.directory).exists()
    assert "nothing: Ray does not run" in commands.run("down", "--local")
