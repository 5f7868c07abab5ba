"""What a decision of the coordinator takes: 1,000 adapters on 64 devices, of which one becomes idle."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.cluster import Cluster, device, request, task

HOSTS, DEVICES, ADAPTERS, ROUNDS = 16, 4, 1000, 40


@pytest.mark.benchmark(timer=time.process_time)
def test_decision(benchmark: Any) -> None:
    """From a device's report of an end to the orders that follow, without the journal and the network."""
    hosts = [f"host{n}" for n in range(HOSTS)]
    cluster = Cluster({host: [device(host, str(n)) for n in range(DEVICES)] for host in hosts})
    cluster.submit(request("run", [task(f"a{n}") for n in range(ADAPTERS)]))
    given = [order for _, order in cluster.decide()]
    assert len(given) == HOSTS * DEVICES

    def end_one() -> None:
        cluster.report(given.pop(0), step=100, copy=100, final=True, ended="done")

    def decide() -> None:
        ((_, order),) = cluster.board.decide(cluster.now)
        given.append(order)

    benchmark.group = "cluster"
    benchmark.pedantic(decide, setup=end_one, rounds=ROUNDS)
