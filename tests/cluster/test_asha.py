"""ASHA ends poor tasks, goes on after a restart, and counts nothing twice."""

from __future__ import annotations

import json
import random

import pytest

from wgpu_lora.cluster.coordinator import asha
from wgpu_lora.cluster.coordinator.asha import Asha
from wgpu_lora.cluster.facts import Sweep
from wgpu_lora.errors import UserError

pytest.importorskip("ray.tune")
SWEEP = Sweep("eval_loss", "asha", grace_period=2, reduction_factor=2)


def test_poor_tasks_end_and_good_ones_go_on() -> None:
    found, ended = Asha(SWEEP, 16), dict[str, int]()
    for step in range(1, 17):
        for number in range(8):
            task = f"t{number}"
            if task not in ended and task in found.reported(task, step, 1 + number + 1 / step):
                ended[task] = step
    assert "t0" not in ended
    assert set(ended) == {f"t{number}" for number in range(1, 8)}


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_the_best_goes_on_whatever_comes_first(order: tuple[int, ...]) -> None:
    """As members of a pipeline do, which report in one order, again at each rung."""
    found = Asha(Sweep(scheduler="asha", grace_period=2, reduction_factor=4), 64)
    for number in order[:3]:
        assert found.reported(str(number), 2, 1.0 + number) == []  # there are too few to compare
    assert found.reported(str(order[3]), 2, 1.0 + order[3]) == ["1", "2", "3"]


def test_a_task_that_is_to_end_stays_so() -> None:
    found = Asha(SWEEP, 16)
    found.reported("b", 1, 500.0)  # before the grace period
    found.reported("a", 2, 100.0)
    assert found.reported("b", 2, 101.0) == ["b"]
    assert found.reported("b", 3, 0.0) == ["b"]
    assert found.reported("c", 2, 102.0) == ["b", "c"]


def test_steps_taken_again_decide_nothing() -> None:
    found = Asha(SWEEP, 16)
    for task, loss in (("a", 1.0), ("b", 2.0)):
        found.reported(task, 4, loss)
    before = found.state()
    assert found.reported("a", 2, 50.0) == ["b"]  # moved, from an older checkpoint
    assert found.reported("a", 4, 50.0) == ["b"]
    assert found.state() == before


def test_a_restarted_one_decides_as_the_first_would_have() -> None:
    draws = random.Random(0)
    results = [(f"t{draws.randrange(12)}", step, draws.uniform(0, 3)) for step in range(1, 33) for _ in range(12)]
    whole, ends = Asha(SWEEP, 32), []
    for result in results:
        ends.append(whole.reported(*result))
    assert 0 < len(ends[-1]) < 12
    for cut in (0, 1, 57, 200, len(results)):
        first = Asha(SWEEP, 32)
        for result in results[:cut]:
            first.reported(*result)
        second = Asha(SWEEP, 32, json.loads(json.dumps(first.state())))
        assert [second.reported(*result) for result in results[cut:]] == ends[cut:]
        assert second.state() == whole.state()


def test_state_is_bounded_by_tasks_and_rungs() -> None:
    found = Asha(Sweep(scheduler="asha", grace_period=1, reduction_factor=4), 1000)
    for step in range(1, 1001):
        for task in ("a", "b", "c"):
            found.reported(task, step, 1 / step)
    assert len(found.state()["results"]) == 3 * 5  # rungs 1, 4, 16, 64, 256


def test_a_loss_that_is_no_number_decides_nothing() -> None:
    found = Asha(SWEEP, 16)
    assert not found.reported("a", 2, float("nan"))
    assert found.state() == {"results": []}


def test_what_cannot_be_compared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="grace period of 20 steps"):
        Asha(Sweep(scheduler="asha", grace_period=20), 20)
    with pytest.raises(UserError, match="end by time"):
        Asha(SWEEP, 0)
    monkeypatch.setattr(asha, "find_spec", lambda name: None if name == "pyarrow" else object())
    with pytest.raises(UserError, match=r"pyarrow is not installed: run .*sweep"):
        Asha(SWEEP, 16)
