"""Every brick under pytest-benchmark, correctness first: figures that can be stored and compared (`make bench`).

What counts is the time that a workload gives itself: the device's own, where it has a clock.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from wgpu_lora.bench.brick import Context, Workload
from wgpu_lora.bench.brick_run import check_fit
from wgpu_lora.bench.bricks import WORKLOADS, bricks_of
from wgpu_lora.bench.contract import brick_names, load_contract

CASES = [
    pytest.param(name, case, id=f"{name}-{case}".strip("-").replace(" ", "-"))
    for name in brick_names()
    for case in {"ttft": ("7 tokens", "512 tokens"), "batch": ("4 sequences", "4 adapters")}.get(name, ("",))
]


def the_case(context: Context, name: str, case: str) -> Workload:
    (match,) = (workload for workload in WORKLOADS[name](context) if workload.case == case)
    return match


class WorkloadClock:
    """Stands in for a clock: it goes forward by what each iteration says of itself."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = WorkloadClock()


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize(("name", "case"), CASES)
def test_brick(context: Context, name: str, case: str, benchmark: Any) -> None:
    if name not in bricks_of(context.config):
        pytest.skip(f"{context.name} does not have it")
    contract = load_contract(name)
    check_fit(context, name)
    workload = the_case(context, name, case)

    def iteration() -> None:
        CLOCK.now += workload.run()

    try:
        workload.open()
        checked = workload.check(np.random.default_rng())
        assert checked is None or contract.accuracy is None or checked.nmse <= contract.accuracy.nmse
        benchmark.group = contract.kind
        benchmark.extra_info |= {"clock": workload.clock, **context.options()}
        rounds = contract.measure.iterations
        benchmark.pedantic(iteration, rounds=rounds, warmup_rounds=contract.measure.warmup)
    finally:
        workload.close()
