"""What a coordinator does with copies: where they go, which it resumes from, and which are results."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.cluster import Cluster, device, request, task

from wgpu_lora.cluster.coordinator.board import COPY_SECONDS
from wgpu_lora.cluster.coordinator.ending import FAILURES


def test_a_copy_on_a_host_that_is_gone_is_waited_for_but_not_for_ever() -> None:
    cluster = Cluster({"a": [device("a", "x")], "b": []})
    cluster.submit(request("r", [task("one")]))
    ((_, order),) = cluster.decide()
    assert order.shelf == "node-b"
    cluster.report(order, step=5, copy=5)
    cluster.survey("a")
    cluster.report(order, step=6, ended="killed")
    assert cluster.decide() == []
    cluster.fence(order.unit)  # other shelves are asked first
    assert cluster.decide() == []
    assert "waits for the host b" in cluster.snapshot().tasks[0].said
    assert cluster.decide(COPY_SECONDS + 1) == []
    cluster.fence(order.unit)
    ((_, anew),) = cluster.decide()
    assert (anew.restore, anew.epoch) == (None, 2)
    assert cluster.task("r", "one").progress.step == 0


def test_another_shelf_with_the_same_copy_is_taken_at_once() -> None:
    """The device that a trainer was killed on keeps its last copy, too."""
    cluster = Cluster({"a": [device("a", "x")], "b": []})
    cluster.submit(request("r", [task("one")]))
    ((_, order),) = cluster.decide()
    cluster.report(order, step=5, copy=5)
    cluster.report(order, step=6, ended="killed")
    cluster.survey("a")
    assert cluster.decide() == []
    cluster.fence(order.unit, replace(cluster.copy(order, 5), host="node-a"))
    ((_, again),) = cluster.decide()
    assert (again.restore_from, cluster.task("r", "one").progress.step) == ("node-a", 5)


def test_another_shelf_has_an_older_copy_of_a_host_that_is_gone() -> None:
    cluster = Cluster({"a": [device("a", "x")], "b": []})
    cluster.submit(request("r", [task("one")]))
    ((_, order),) = cluster.decide()
    older = replace(cluster.copy(order, 3), host="node-a")
    cluster.report(order, step=5, copy=5)
    cluster.survey("a")
    cluster.report(order, step=6, ended="killed")
    cluster.decide()
    cluster.fence(order.unit, older)
    assert cluster.decide() == []  # the newer one may come back
    cluster.decide(COPY_SECONDS + 1)
    cluster.fence(order.unit, older)
    ((_, again),) = cluster.decide()
    assert again.restore == older.digest
    assert cluster.task("r", "one").progress.step == 3


def test_a_copy_that_cannot_be_read_is_not_used_again() -> None:
    cluster = Cluster({"a": [device("a", "x")]})
    cluster.submit(request("r", [task("one")]))
    ((_, order),) = cluster.decide()
    cluster.report(order, step=5, copy=5)
    cluster.report(order, step=6, ended="killed")
    ((_, second),) = cluster.decide()
    cluster.report(second, step=0, ended="no copy", said="it is damaged")
    assert cluster.decide() == []
    cluster.fence(order.unit, cluster.copy(order, 5))
    ((_, third),) = cluster.decide()
    assert (third.restore, third.epoch) == (None, 3)
    assert cluster.board.state.devices["a/x"].failures == 0


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_the_checkpoint_of_a_task_that_ends_between_two_devices_is_its_result(how: str) -> None:
    cluster = Cluster({"a": [device("a", "x")]})
    cluster.submit(request("r", [task("one")]))
    ((_, order),) = cluster.decide()
    cluster.report(order, step=5, copy=5)
    cluster.report(order, step=6, ended="killed")
    if how == "cancelled":
        cluster.board.cancel("r", None, cluster.now)
    for _ in range(FAILURES if how == "failed" else 0):
        ((_, order),) = cluster.decide()
        cluster.report(order, step=6, ended="failed")
        cluster.board.state.devices["a/x"].quarantined = False
    found = cluster.task("r", "one")
    assert (found.state, found.results, found.fetched) == (how, True, False)


def test_results_of_earlier_steps_than_a_checkpoint_are_results() -> None:
    """A run whose newest update ruined its weights ends with the checkpoint before."""
    cluster = Cluster({"a": [device("a", "x")]})
    cluster.submit(request("r", [task("one")]))
    ((_, order),) = cluster.decide()
    cluster.report(order, step=20, copy=20)
    cluster.report(order, step=20, copy=10)  # but no other copy
    unit = cluster.board.state.units[order.unit]
    assert unit.copy
    assert unit.copy.steps == {"one": 20}
    said = "its loss was not finite"
    cluster.report(order, step=20, copy=10, final=True, outcomes={"one": "failed"}, ended="done", said=said)
    found = cluster.task("r", "one")
    assert (found.state, found.said, found.results) == ("failed", said, True)
    assert unit.copy.steps == {"one": 10}
    assert cluster.decide() == []


def test_results_go_to_the_coordinators_host() -> None:
    cluster = Cluster({"a": [device("a", "x")], "b": [device("b", "x")]})
    cluster.submit(request("r", [task("one"), task("two")], join="never"))
    orders = {order.shelf: order for _, order in cluster.decide()}
    assert set(orders) == {"node-a", "node-b"}
    assert {order.results for order in orders.values()} == {"node-a"}


def test_a_copy_at_a_node_that_is_not_known_yet_does_not_hide_where_the_newest_is() -> None:
    """After the head has started again, shelves may be asked before the first survey."""
    cluster = Cluster({"a": [device("a", "x")]})
    cluster.submit(request("r", [task("one")]))
    ((_, order),) = cluster.decide()
    cluster.report(order, step=5, copy=5)
    cluster.restart()
    cluster.decide(100)
    cluster.fence(order.unit, replace(cluster.copy(order, 5), host="new-node"))
    cluster.survey("a")
    ((_, again),) = cluster.decide()
    assert (again.restore, again.restore_from) == ("1-5", "node-a")
