"""Failures at three hosts with fake workers: no step is lost from a log or in it twice, whatever dies."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_workers import Lab
from support.hosts import Hosts, namespaces_allowed, until

pytestmark = pytest.mark.skipif(not namespaces_allowed(), reason="namespaces cannot be made here")

PACE = 0.3  # seconds per step


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Hosts(3, shared=tmp_path_factory.mktemp("lab")) as hosts:
        made = Lab(hosts)
        yield made
        made.end_driver()


def kill(pids: list[int]) -> None:
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_actors_that_are_killed_at_once(lab: Lab) -> None:
    names = ["a0", "a1", "a2"]
    assert lab.submit("actors", *(lab.task(name, steps=60, pace=PACE) for name in names)) == {"run": "actors"}
    first, second, third = (lab.placed("actors", name, 4) for name in names)
    assert {first, second, third} == {0, 1, 2}
    kill(lab.workers(first))
    kill(lab.actors(second, "Device"))
    kill(lab.actors(third, "Host"))
    kill(lab.actors(0, "Coordinator"))
    seen = lab.over("actors")
    assert {view.state for view in seen.values()} == {"finished"}, lab.said("actors")
    for name in names:
        assert lab.steps("actors", name) == list(range(1, 61))
    assert len({result["host"] for result in lab.results("actors").values()}) == 1  # the head's


def test_a_stopped_device_and_a_cut_network_publish_one_result_each(lab: Lab, tmp_path: Path) -> None:
    out = lab.hosts.shared / "published"
    out.mkdir()
    tasks = [replace(lab.task(name, steps=80, pace=PACE), output=str(out / name)) for name in ("b0", "b1")]
    lab.submit("stopped", *tasks, shared=str(out))
    away = next(name for name in ("b0", "b1") if lab.placed("stopped", name, 4))
    where = lab.placed("stopped", away)
    old, device = lab.workers(where), lab.actors(where, "Device")
    for pid in device:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: lab.views("stopped")[away].attempts == 2, 90)
    for pid in device:
        os.kill(pid, signal.SIGCONT)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in old), 30)
    lab.placed("stopped", away, 4)
    lab.hosts[where].partition()
    time.sleep(4)  # less than Ray takes to notice
    lab.hosts[where].heal()
    seen = lab.over("stopped")
    assert {view.state for view in seen.values()} == {"finished"}, lab.said("stopped")
    until(lambda: all(view.fetched for view in lab.views("stopped").values()), 60)
    for task in tasks:
        lines = Path(task.output, "log.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, 81))


def test_the_heads_ray_starts_again_and_goes_on_from_its_journal(lab: Lab) -> None:
    lab.submit("head", *(lab.task(name, steps=60, pace=PACE) for name in ("c0", "c1")))
    for name in ("c0", "c1"):
        lab.placed("head", name, 8)
    lab.end_driver()
    for host in lab.hosts:
        host.restart_node()
    seen = lab.over("head", 180)
    assert {view.state for view in seen.values()} == {"finished"}, lab.said("head")
    for name in ("c0", "c1"):
        assert lab.steps("head", name) == list(range(1, 61))
        assert seen[name].attempts == 2
