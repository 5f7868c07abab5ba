"""Tasks with teachers that the evaluation device caches: when they start, with what, and what follows if it cannot."""

from __future__ import annotations

from typing import Any

import pytest
from support.cluster import CLASS, Cluster, device, request, task
from support.fake_cluster import FakeCluster, device_facts, node_facts

from wgpu_lora.cli.cluster.run_table import state_of
from wgpu_lora.cluster.client.preflight import request_of
from wgpu_lora.cluster.coordinator import teaching
from wgpu_lora.cluster.coordinator.caches import BoardCaches
from wgpu_lora.cluster.coordinator.state import CacheState
from wgpu_lora.cluster.coordinator.taught import as_trained
from wgpu_lora.cluster.facts import CacheStanding, RunRequest, RunRequirements, Task, Taught, from_plain, to_plain
from wgpu_lora.cluster.spec.run_options import RunOptions

DIGESTS = "a" * 64, "b" * 64
PARCELS = {
    "teacher_cache": f"sent:{DIGESTS[0]}/teacher_cache",
    "eval_teacher_cache": f"sent:{DIGESTS[1]}/eval_teacher_cache",
}
COMPLETE = CacheStanding(8, 8, PARCELS, ["node-a", "node-b"])


def asked(name: str = "r", *, live: int | None = 500, needed: int = 40) -> RunRequest:
    """Two tasks with one teacher, and one without; `live` are the bytes with the teacher beside the student."""
    tasks = [task("one", teacher="/t", teacher_top_k=8), task("two", teacher="/t", teacher_top_k=8), task("plain")]
    with_it = {} if live is None else {CLASS: RunRequirements(live, base_bytes=20, base="base", work=1000, steps=100)}
    taught = {one.name: Taught("c", with_it) for one in tasks[:2]}
    return request(name, tasks, needed=needed, eval_device="b/eval", join="never", taught=taught)


def cluster_of(**more: Any) -> Cluster:
    """Three devices that train, and one for evaluations."""
    made = Cluster({"a": [device("a", "x"), device("a", "y"), device("a", "z")], "b": [device("b", "eval")]})
    made.submit(asked(**more))
    return made


def due(cluster: Cluster) -> CacheState:
    (cache,) = BoardCaches(cluster.board).due(cluster.now)
    return cache


def told(cluster: Cluster, standing: CacheStanding) -> None:
    BoardCaches(cluster.board).told(due(cluster), standing, cluster.now)


def states(cluster: Cluster) -> dict[str, str]:
    return {view.name: state_of(view) for view in cluster.snapshot().tasks}


def test_tasks_wait_for_the_cache_that_they_share_while_others_train() -> None:
    cluster = cluster_of()
    ((_, order),) = cluster.decide()
    assert [one.name for one in order.tasks] == ["plain"]
    assert states(cluster) == {"one": "teacher cache: to begin", "two": "teacher cache: to begin", "plain": "starting"}
    assert due(cluster).attempt == 1
    told(cluster, CacheStanding(2, 8))
    assert due(cluster).attempt == 1  # it is asked after, not begun again
    assert states(cluster)["two"] == "teacher cache: 25%"
    assert cluster.decide() == []
    told(cluster, COMPLETE)
    orders = {order.tasks[0].name: order for _, order in cluster.decide()}
    assert set(orders) == {"one", "two"}
    for one in orders.values():
        assert one.tasks[0].options == PARCELS  # and no teacher
        assert one.parcels == {digest: ["node-a", "node-b"] for digest in DIGESTS}
    assert BoardCaches(cluster.board).due(cluster.now) == []


def test_what_a_copy_is_measured_with() -> None:
    cluster = cluster_of()
    board = cluster.board
    one, *_, plain = board.requests["r"].tasks
    assert as_trained(board.state, board.requests["r"], one) == one
    told(cluster, COMPLETE)
    assert as_trained(board.state, board.requests["r"], one).options == PARCELS
    assert as_trained(board.state, board.requests["r"], plain) == plain


def test_a_restarted_coordinator_asks_after_the_cache_that_is_being_made() -> None:
    cluster = cluster_of()
    told(cluster, CacheStanding(2, 8))
    cluster.restart()
    cluster.survey("a", "b")
    cache = due(cluster)
    assert (cache.phase, cache.attempt) == ("making", 1)
    told(cluster, COMPLETE)
    cluster.restart()
    cluster.survey("a", "b")
    assert {order.tasks[0].name for _, order in cluster.decide()} == {"one", "two", "plain"}


def test_a_process_that_fails_is_started_again_and_progress_forgives() -> None:
    cluster = cluster_of()
    for rows in range(1, 3 * teaching.FAILURES):
        cache = due(cluster)
        assert cache.attempt == rows
        told(cluster, CacheStanding(rows, 99, ended="failed", said="It crashed."))
        assert BoardCaches(cluster.board).due(cluster.now) == []
        cluster.now += teaching.RETRY_SECONDS
    assert states(cluster)["one"] == "teacher cache: will be tried again"
    assert cluster.snapshot().tasks[0].said == "It crashed."


@pytest.mark.parametrize(
    ("ended", "tries"), [("failed", teaching.FAILURES), ("away", teaching.MISSES), ("no room", teaching.MISSES)]
)
def test_after_some_failures_the_teacher_is_beside_the_student(ended: str, tries: int) -> None:
    cluster = cluster_of()
    for _ in range(tries):
        assert {order.tasks[0].name for _, order in cluster.decide()} <= {"plain"}
        told(cluster, CacheStanding(ended=ended, said="It is lost."))
        cluster.now += teaching.RETRY_SECONDS * 2**teaching.DOUBLINGS
        cluster.survey("a", "b")
    orders = {order.tasks[0].name: order for _, order in cluster.decide()}
    assert {"one", "two"} <= set(orders)
    assert orders["one"].tasks[0].options["teacher"] == "/t"
    assert cluster.board.state.units["r/one"].needed == 500
    assert any("has its teacher beside it" in line.text for line in cluster.snapshot().events)


@pytest.mark.parametrize(
    ("live", "said"), [(5000, "device memory"), (None, "cannot be planned on any device")], ids=["large", "refused"]
)
def test_tasks_fail_if_their_teacher_fits_nowhere_beside_them(live: int | None, said: str) -> None:
    cluster = cluster_of(live=live)
    told(cluster, CacheStanding(ended="refused", said="The teacher has another tokenizer."))
    for name in ("one", "two"):
        found = cluster.task("r", name)
        assert found.state == "failed"
        assert "There is no teacher cache (The teacher has another tokenizer)" in found.said
        assert said in found.said
    ((_, order),) = cluster.decide()
    cluster.report(order, step=1, copy=1, final=True)
    cluster.report(order, step=1, outcomes={"plain": "finished"}, ended="done")
    assert cluster.board.idle


def test_a_cache_whose_hosts_are_gone_is_made_again() -> None:
    cluster = cluster_of()
    told(cluster, COMPLETE)
    orders = {order.tasks[0].name: order for _, order in cluster.decide()}
    cluster.report(orders["one"], step=1)
    cluster.survey("a")
    cluster.report(orders["one"], step=1, ended="killed")
    assert BoardCaches(cluster.board).due(cluster.now) == []
    ((_, again),) = cluster.decide()
    assert again.parcels == {digest: ["node-a"] for digest in DIGESTS}  # which has it
    cluster.board.state.caches["r/c"].at = ["b"]
    cluster.decide()
    assert BoardCaches(cluster.board).due(cluster.now) == []  # nothing waits for it
    cluster.report(again, step=1, ended="killed")
    assert cluster.decide() == []
    cache = due(cluster)
    assert (cache.phase, cache.attempt, cache.parcels) == ("making", 2, {})


def test_nothing_is_made_for_tasks_that_have_been_cancelled() -> None:
    cluster = cluster_of()
    due(cluster)
    assert BoardCaches(cluster.board).unwanted() == []
    cluster.board.cancel("r", None, cluster.now)
    assert [cache.id for cache in BoardCaches(cluster.board).unwanted()] == ["r/c"]
    assert BoardCaches(cluster.board).due(cluster.now) == []
    assert BoardCaches(cluster.board).unwanted() == []


def test_a_run_takes_its_caches_with_it_but_those_that_another_has() -> None:
    cluster = cluster_of()
    told(cluster, COMPLETE)
    assert teaching.only_of(cluster.board.state, "r") == list(DIGESTS)
    other = asked("s")
    cluster.submit(
        RunRequest(**{**vars(other), "tasks": [Task(one.name, one.options, f"s/{one.name}") for one in other.tasks]})
    )
    told(cluster, CacheStanding(8, 8, {"teacher_cache": PARCELS["teacher_cache"]}, ["node-a"]))
    assert teaching.only_of(cluster.board.state, "r") == [DIGESTS[1]]
    cluster.board.cancel("r", None, cluster.now)
    cluster.board.forget("r")
    assert set(cluster.board.state.caches) == {"s/c"}


def test_preflight_plans_tasks_without_their_teachers() -> None:
    nodes = [node_facts("alpha", device_facts("10.0.0.5", 0, "A"), device_facts("10.0.0.5", 1, "B"))]
    tasks = [Task("a", {"data": "demo", "teacher": "demo"}, "/a"), Task("b", {"data": "demo"}, "/b")]
    found = request_of(FakeCluster(nodes), nodes, tasks, RunOptions(eval_device="B"))
    assert from_plain(RunRequest, to_plain(found)) == found
    assert found.plans["a"]["p"].needed == 1 << 10
    assert {name: (one.caches, one.live["p"].needed) for name, one in found.taught.items()} == {
        "a": ("caches", 1 << 20)
    }
    alone = request_of(FakeCluster(nodes), nodes, tasks, RunOptions())
    assert (alone.taught, alone.plans["a"]["p"].needed) == ({}, 1 << 20)
