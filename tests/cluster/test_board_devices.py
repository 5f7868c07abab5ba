"""What the coordinator decides about devices."""

from __future__ import annotations

import pytest
from support.cluster import Cluster, device, request, task

from wgpu_lora.cluster.coordinator.ending import KILLS, NO_ROOM_SECONDS
from wgpu_lora.errors import UserError


def test_a_device_that_fails_twice_in_a_row_is_quarantined_until_it_is_released() -> None:
    cluster = Cluster({"a": [device("a", "x")]})
    cluster.submit(request("r", [task("one"), task("two")], join="never"))
    for _ in range(2):
        ((_, order),) = cluster.decide()
        cluster.report(order, step=1, ended="failed")
    assert cluster.decide() == []
    (seen,) = cluster.snapshot().devices
    assert seen.state == "quarantined"
    assert all("quarantined" in view.said for view in cluster.snapshot().tasks)
    assert "cluster release a/x" in cluster.snapshot().events[-1].text
    cluster.board.release("a/x", cluster.now)
    assert len(cluster.decide()) == 1
    with pytest.raises(UserError, match="No device a/x is quarantined"):
        cluster.board.release("a/x", cluster.now)


def test_adapters_that_fail_anywhere_take_no_device_from_others() -> None:
    cluster = Cluster({name: [device(name, "x")] for name in "abc"})
    cluster.submit(request("r", [task("one"), task("two")], join="never"))
    for _ in range(20):
        orders = cluster.decide()
        for _, order in orders:
            cluster.report(order, step=1, ended="failed")
        if not orders:
            break
    assert [cluster.task("r", name).state for name in ("one", "two")] == ["failed", "failed"]
    cluster.submit(request("s", [task(name) for name in ("x", "y", "z")], join="never"))
    assert len(cluster.decide()) >= 2
    assert sum(view.state == "quarantined" for view in cluster.snapshot().devices) <= 1


def test_kills_from_outside_are_no_fault_of_the_device_but_do_not_go_on_for_ever() -> None:
    cluster = Cluster({"a": [device("a", "x")]})
    cluster.submit(request("r", [task("one")]))
    for _ in range(KILLS):
        ((_, order),) = cluster.decide()
        cluster.report(order, step=1, ended="killed")
    assert cluster.board.state.devices["a/x"].failures == 0
    assert cluster.task("r", "one").state == "failed"


def test_no_room_tries_elsewhere_and_again_after_a_while() -> None:
    cluster = Cluster({"a": [device("a", "x", speed=9.0)], "b": [device("b", "y")]})
    cluster.submit(request("r", [task("one")]))
    for expected in ("a/x", "b/y"):
        ((where, order),) = cluster.decide()
        assert where == expected
        cluster.report(order, step=0, ended="no room", said="others hold it")
    assert cluster.decide() == []
    assert len(cluster.decide(NO_ROOM_SECONDS + 1)) == 1
    assert all(seen.failures == 0 for seen in cluster.snapshot().devices)


def test_a_device_that_measures_held_out_losses_does_not_train_that_run() -> None:
    cluster = Cluster({"a": [device("a", "x", speed=9.0), device("a", "y")]})
    cluster.submit(request("r", [task("one"), task("two")], eval_device="a/x", join="never"))
    ((where, order),) = cluster.decide()
    assert where == "a/y"
    assert order.heldout_elsewhere
    cluster.board.heldout("r", "one", 5, 0.5)
    cluster.board.heldout("r", "one", 6, 0.7)
    progress = cluster.task("r", "one").progress
    assert (progress.eval_loss, progress.best_eval_loss) == (0.7, 0.5)


def test_a_data_parallel_task_gets_distinct_devices() -> None:
    cluster = Cluster({"a": [device("a", "x"), device("a", "y", speed=2.0)]})
    cluster.submit(request("r", [task("one")], data_parallel=2))
    ((where, order),) = cluster.decide()
    assert (where, order.helpers) == ("a/y", ["a/x"])
    assert all(seen.units == ["r/one"] for seen in cluster.snapshot().devices)


def test_what_has_lost_its_devices_is_said_and_goes_on_when_they_are_back() -> None:
    cluster = Cluster({"a": [], "b": [device("b", "x")]})
    cluster.submit(request("r", [task("one")]))
    ((_, order),) = cluster.decide()
    cluster.report(order, step=5, copy=5)
    cluster.survey("a")
    cluster.advance(100)
    cluster.fence("r/one")
    assert cluster.decide() == []
    (view,) = cluster.snapshot().tasks
    assert "gone" in view.said
    cluster.survey("a", "b")
    assert len(cluster.decide(NO_ROOM_SECONDS)) == 1


def test_free_memory_follows_what_is_placed_between_surveys() -> None:
    cluster = Cluster({"a": [device("a", "x", budget=100, free=100)]})
    cluster.submit(request("r", [task("one"), task("two"), task("three")], needed=40, jobs_per_device=3, join="never"))
    orders = cluster.decide()
    assert len(orders) == 2
    cluster.survey("a")  # nothing has loaded yet, so that the survey says that all is free
    assert cluster.decide() == []
    cluster.report(orders[0][1], step=1, ended="killed")
    assert cluster.board.state.devices["a/x"].free == 60


def test_an_unmeasured_device_is_measured_before_anything_is_placed_on_it() -> None:
    cluster = Cluster({"a": [device("a", "x", speed=None)], "b": [device("b", "y", speed=None)]})
    assert cluster.board.unmeasured(cluster.now) == []  # nothing waits for it
    cluster.submit(request("r", [task("one")]))
    assert cluster.board.unmeasured(cluster.now) == [("node-a", "x"), ("node-b", "y")]
    assert cluster.board.unmeasured(cluster.now) == []
    assert cluster.decide() == []
    cluster.board.measured("a/x", 10.0, 1.5)
    cluster.board.measured("b/y", 1000.0, 1.5)
    ((where, _),) = cluster.decide()
    assert where == "b/y"
    cluster.survey("a", "b")  # the hosts have not kept it, since other programs ran
    assert [view.facts.speed for view in cluster.snapshot().devices] == [10.0, 1000.0]
    assert cluster.board.unmeasured(cluster.now + 3600) == []  # nothing waits
    cluster.submit(request("s", [task("two"), task("three")], by="another"))
    assert cluster.board.unmeasured(cluster.now + 3600) == [("node-a", "x")]  # the other one is busy


def test_a_device_that_cannot_be_measured_is_used_all_the_same() -> None:
    cluster = Cluster({"a": [device("a", "x", speed=None)]})
    cluster.submit(request("r", [task("one"), task("two")]))
    assert len(cluster.board.unmeasured(cluster.now)) == 1
    assert cluster.decide(100) == []
    assert len(cluster.decide(21)) == 1  # nothing was heard of it


@pytest.mark.parametrize(("devices", "tasks", "join", "expected"), [
    ("x", 1, "auto", 0), ("x", 2, "never", 0), ("x", 2, "auto", 1), ("xx", 2, "auto", 0), ("xx", 3, "never", 2),
    ("xy", 1, "auto", 2),
])  # fmt: skip
def test_nothing_waits_for_speeds_that_decide_nothing(devices: str, tasks: int, join: str, expected: int) -> None:
    there = [device("a", f"{name}{at}", name=name, speed=None) for at, name in enumerate(devices)]
    cluster = Cluster({"a": there})
    cluster.submit(request("r", [task(f"t{number}") for number in range(tasks)], join=join))
    assert len(cluster.board.unmeasured(cluster.now)) == expected
