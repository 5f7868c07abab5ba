"""Random kills of workers, nodes, the head and the network, drawn by a fixed seed: every adapter is trained once."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from support.cli import flags
from support.cluster.cluster_runs import SMALL_STEPS, cluster, rows_of, status
from support.cluster.hosts import Host, Hosts, drivers_here, until
from support.sampling import FULL, seeds

from wgpu_lora.train.run.training_log import LOG, read_log

ADAPTERS = 4
KILLS = 30 if FULL else 6
STEPS = 800 if FULL else 240
ROWS = 8  # of each adapter, one per step
OPTIONS = {**SMALL_STEPS, "max_steps": STEPS}
KINDS = ("worker", "node", "network", "head")  # one of each, then by weight: all but the first take many seconds
WEIGHTS = (6, 1, 1, 0)


def workers(host: Host) -> list[int]:
    """Processes that train on a host."""
    return [pid for pid, line in host.processes().items() if line.startswith("ray::TrainingActor")]


def harm(hosts: Hosts, random: Random, kind: str) -> None:
    """Kill or cut off something, which trains now if anything does."""
    busy = [host for host in hosts if workers(host)]
    if kind == "worker":
        pids = [pid for host in busy for pid in workers(host)]
        with suppress(ProcessLookupError, IndexError):
            os.kill(random.choice(pids), signal.SIGKILL)
    elif kind == "head":  # all of Ray starts again, and with a command the controller, which goes on from its state
        hosts.start_nodes()
        status(hosts)
    else:
        _, *nodes = hosts
        host = random.choice([host for host in nodes if host in busy] or nodes)
        if kind == "node":
            host.restart_node()
        else:
            host.partition()
            time.sleep(random.uniform(1, 20))  # shorter and longer than Ray takes to notice
            host.heal()


def supervise(hosts: Hosts) -> None:
    """Start nodes again that have ended: one that was cut off for long was declared dead, and ends itself."""
    for host in hosts:
        if host.index and not any("raylet" in line for line in host.processes().values()):
            host.restart_node()


def test_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    (seed,) = seeds(1, "chaos")
    random = Random(seed)
    data = [rows_of(tmp_path, number) for number in range(ADAPTERS)]
    outputs = [tmp_path / "made" / f"a{number}" for number in range(ADAPTERS)]
    named = [word for rows, output in zip(data, outputs, strict=True) for word in ("--adapters", f"{rows}:{output}")]
    # Of one kind: an adapter that ends on a driver ten times as slow would take most of the time.
    with Hosts(3, shared=tmp_path, drivers=drivers_here()[:1]) as hosts:
        hosts.start_nodes()
        until(lambda: len(status(hosts)["devices"]) == 3)
        run_options = ["--name", "chaos", "--mirror-steps", "20", "--join", "never", "--detach"]
        cluster(hosts, "run", *run_options, *named, *flags(**OPTIONS))
        kinds = [*random.sample(KINDS, len(KINDS)), *random.choices(KINDS, WEIGHTS, k=KILLS - len(KINDS))]
        for kind in kinds:
            supervise(hosts)
            until(lambda: any(map(workers, hosts)) or _over(hosts))
            time.sleep(random.uniform(0.5, 3))
            harm(hosts, random, kind)
        final = until(lambda: _over(hosts), every=2)
        cluster(hosts, "attach", "chaos")  # fetches the results
    assert [task["state"] for task in final["tasks"]] == ["finished"] * ADAPTERS, final["events"]
    for output in outputs:
        entries = read_log(output / LOG)
        assert [entry["step"] for entry in entries] == list(range(1, STEPS + 1))
        counted = [entry["tokens"] for entry in entries]  # since the beginning; an epoch has ROWS steps
        assert counted[ROWS - 1 :: ROWS] == [counted[ROWS - 1] * epoch for epoch in range(1, STEPS // ROWS + 1)]
        state: dict[str, Any] = json.loads((output / "run.json").read_text())["state"]
        assert (state["step"], state["tokens"]) == (STEPS, counted[-1])


def _over(hosts: Hosts) -> dict[str, Any] | None:
    supervise(hosts)
    state = status(hosts)
    return state if all(run["over"] for run in state["runs"]) else None
