"""Workers on hosts of a test that train nothing, and a driver on its head that submits without plans.

A `sitecustomize.py` on the hosts' PYTHONPATH replaces the worker's program by `fake_trainer.py`, so that a run takes
seconds; actors, shelves and the network between them are real.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.hosts import Hosts, until
from support.units import fake_task, write_checkpoint
from wgpu_lora.cluster.facts import RunRequest, RunRequirements, Snapshot, Task, TaskView, from_plain, to_plain

HERE = Path(__file__).parent
CUSTOM = f"""
import sys
from wgpu_lora.worker import worker
worker.PROGRAM = (sys.executable, {str(HERE / "fake_trainer.py")!r})
worker.Worker.__init__.__kwdefaults__["program"] = worker.PROGRAM
"""
DRIVER = """
import json, sys
from wgpu_lora.cluster.client.bridge_child import actor, answered, connected
out = sys.stdout
sys.stdout = sys.stderr
connected("auto")
print(json.dumps("ready"), file=out, flush=True)
for line in sys.stdin:
    name, method, arguments = json.loads(line)
    header = {"actor": name, "call": method, "args": arguments, "with_bytes": False, "seconds": 60}
    try:
        found, data = answered(header, b"")
        if "bytes" in found:
            found = {"value": data.decode()}
    except Exception as error:
        found = {"gone": str(error)[-500:]}
    print(json.dumps(found), file=out, flush=True)
"""
OVER = ("finished", "stopped", "failed", "cancelled")


class Lab:
    """Hosts with a Ray on each, whose workers are fakes, and a driver on the head."""

    def __init__(self, hosts: Hosts, lease: float = 6.0):
        self.hosts, self.template = hosts, write_checkpoint(hosts.shared / "template", 0)
        custom = hosts.shared / "custom"
        custom.mkdir()
        (custom / "sitecustomize.py").write_text(CUSTOM)
        path = f"{custom}:{hosts[0].env['PYTHONPATH']}:{HERE.parent}"
        cache = hosts.shared / "cache"  # of speeds that are made up
        self.env = {"PYTHONPATH": path, "WGPU_LORA_CLUSTER_LEASE": str(lease), "WGPU_LORA_CACHE_DIR": str(cache)}
        for host in hosts:
            host.start_node({}, env=self.env)
        self._driver: subprocess.Popen[str] | None = None
        until(lambda: len(self.ask("nodes")) == len(hosts), 120)

    def drive(self) -> subprocess.Popen[str]:
        """The driver, which is started if there is none."""
        if self._driver is None:
            self._driver = self.hosts[0].start(
                [sys.executable, "-c", DRIVER], env=self.env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
            assert self._driver.stdout
            assert self._driver.stdout.readline()
        return self._driver

    def end_driver(self) -> None:
        if self._driver:
            self._driver.kill()
            self._driver.wait()
        self._driver = None

    def call(self, name: str, method: str, *arguments: Any) -> Any:
        """A method of an actor; {"gone": why} if it does not answer."""
        driver = self.drive()
        assert driver.stdin
        assert driver.stdout
        driver.stdin.write(json.dumps([name, method, arguments]) + "\n")
        driver.stdin.flush()
        found = json.loads(driver.stdout.readline())
        return found.get("value", found)

    def ask(self, method: str, *arguments: Any, seconds: float = 90) -> Any:
        """A method of the coordinator, which may be starting again."""

        def answer() -> Any:
            found = self.call("coordinator", method, *arguments)
            return None if isinstance(found, dict) and "gone" in found else (found,)

        return until(answer, seconds)[0]

    def task(self, name: str, **options: Any) -> Task:
        made = fake_task(name, self.hosts.shared, **options)
        return Task(name, {**made.options, "template": str(self.template)}, made.output)

    def submit(self, name: str, *tasks: Task, **more: Any) -> Any:
        """Submit tasks that fit all devices."""
        classes = {device["plan_class"] for node in self.ask("nodes") for device in node["devices"]}
        plan = RunRequirements(1 << 20, 1 << 19, "base", ["rows"], 1000, 1000)
        plans = {one.name: dict.fromkeys(classes, plan) for one in tasks}
        asked = RunRequest(name, list(tasks), plans, **{"mirror_steps": 2, "join": "never", **more})
        return self.ask("submit", to_plain(asked))

    def snapshot(self, run: str | None = None) -> Snapshot:
        return from_plain(Snapshot, self.ask("snapshot", run))

    def views(self, run: str) -> dict[str, TaskView]:
        return {view.name: view for view in self.snapshot(run).tasks}

    def over(self, run: str, seconds: float = 120) -> dict[str, TaskView]:
        """The tasks of a run once all have ended."""

        def ended() -> dict[str, TaskView] | None:
            found = self.views(run)
            return found if all(view.state in OVER for view in found.values()) else None

        try:
            return dict(until(ended, seconds))
        except TimeoutError:
            raise AssertionError(self.said(run)) from None

    def said(self, run: str) -> str:
        """What is known of a run, for a failed test."""
        seen = self.snapshot(run)
        return "\n".join([*map(str, seen.tasks), *(f"{line.time:.1f} {line.text}" for line in seen.events[-30:])])

    def placed(self, run: str, task: str, step: int = 1) -> int:
        """The index of the host that trains a task, once it has taken a step."""

        def host() -> tuple[int] | None:
            view = self.views(run)[task]
            if view.state != "running" or view.progress.step < step or not view.device:
                return None
            address = view.device.partition("/")[0]
            return (next(host.index for host in self.hosts if host.address == address),)

        try:
            return int(until(host, 90)[0])
        except TimeoutError:
            raise AssertionError(self.said(run)) from None

    def workers(self, index: int) -> list[int]:
        """Fake trainers on a host."""
        return [pid for pid, line in self.hosts[index].processes().items() if "fake_trainer" in line]

    def actors(self, index: int, kind: str) -> list[int]:
        """Processes of Ray's actors of a class."""
        return [pid for pid, line in self.hosts[index].processes().items() if line.startswith(f"ray::{kind}")]

    def results(self, run: str) -> Mapping[str, dict[str, Any]]:
        return {found["task"]: found for found in self.ask("results", run)}

    def steps(self, run: str, task: str) -> list[int]:
        """The steps of a task's log, read from the shelf that has its results."""
        found = self.results(run)[task]
        where = found["unit"], found["digest"], f"adapters/{task}/log.jsonl"
        read = self.call(f"host:{found['host']}", "read", *where, 0)
        return [json.loads(line)["step"] for line in read.splitlines()]
