"""What the coordinator decides about joined tasks."""

from __future__ import annotations

from typing import Any

from support.cluster import Cluster, device, request, task

from wgpu_lora.cluster.coordinator.ending import NO_ROOM_SECONDS


def joined(cluster: Cluster, *names: str) -> Any:
    cluster.submit(request("r", [task(name) for name in names], join="always"))
    ((_, order),) = cluster.decide()
    assert {task.name for task in order.tasks} == set(names)
    return order


def test_a_pipeline_without_room_is_split() -> None:
    cluster = Cluster({"a": [device("a", "x", joined_speedup=2.0)]})
    order = joined(cluster, "one", "two")
    cluster.report(order, step=0, ended="no room")
    ((_, alone),) = cluster.decide(NO_ROOM_SECONDS + 1)
    assert len(alone.tasks) == 1


def test_a_pipeline_that_is_refused_is_split_so_that_only_the_wrong_task_ends() -> None:
    cluster = Cluster({"a": [device("a", "x", joined_speedup=2.0)]})
    order = joined(cluster, "one", "two")
    cluster.report(order, step=0, ended="refused", said="bad rows")
    ((_, alone),) = cluster.decide()
    cluster.report(alone, step=0, ended="refused", said="bad rows")
    ((_, other),) = cluster.decide()
    assert {alone.unit, other.unit} == {"r/one", "r/two"}
    assert cluster.task(*alone.unit.split("/")).state == "failed"
    assert cluster.task(*other.unit.split("/")).state == "starting"


def test_a_pipeline_with_a_copy_moves_as_a_whole() -> None:
    cluster = Cluster({"a": [device("a", "x", joined_speedup=2.0)]})
    order = joined(cluster, "one", "two", "three")
    cluster.report(order, step=10, copy=10)
    cluster.report(order, step=12, ended="killed")
    cluster.survey("a", "b", more={"b": [device("b", "y"), device("b", "z")]})
    ((_, again),) = cluster.decide()
    assert (again.unit, again.epoch, again.restore) == (order.unit, 2, "1-10")
    assert [one.name for one in again.tasks] == [one.name for one in order.tasks]


def test_tasks_of_a_pipeline_end_alone() -> None:
    cluster = Cluster({"a": [device("a", "x", joined_speedup=2.0)]})
    order = joined(cluster, "one", "two", "three")
    cluster.report(order, step=5, outcomes={"one": "failed"})
    seen = {view.name: view for view in cluster.snapshot().tasks}
    assert seen["one"].state == "running"  # its results cannot be fetched yet
    assert "its pipeline goes on" in seen["one"].progress.doing
    cluster.board.cancel("r", "two", cluster.now)
    assert cluster.report(order, step=6).end == ["two"]
    outcomes = {"one": "failed", "two": "stopped", "three": "finished"}
    cluster.report(order, step=9, copy=9, final=True, outcomes=outcomes, ended="done")
    assert [view.state for view in cluster.snapshot().tasks] == ["failed", "cancelled", "finished"]
