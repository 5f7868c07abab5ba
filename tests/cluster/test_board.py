"""The coordinator's decisions, one by one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from support.cluster import Cluster, device, request, task

from wgpu_lora.cluster.coordinator.board import Board
from wgpu_lora.cluster.coordinator.ending import FAILURES
from wgpu_lora.cluster.coordinator.state import State
from wgpu_lora.cluster.facts import RunRequest, Sweep, from_plain, to_plain
from wgpu_lora.errors import UserError


def test_a_task_is_placed_trained_and_over_when_its_final_copy_is_known() -> None:
    cluster = Cluster({"a": [device("a", "x")]})
    cluster.submit(request("r", [task("one")]))
    ((where, order),) = cluster.decide()
    assert (where, order.unit, order.epoch, order.restore) == ("a/x", "r/one", 1, None)
    assert cluster.task("r", "one").state == "starting"
    assert cluster.report(order, step=3).go_on
    assert cluster.task("r", "one").state == "running"
    cluster.report(order, step=10, copy=10, final=True, outcomes={"one": "finished"})
    assert cluster.task("r", "one").state == "running"
    cluster.report(order, step=10, outcomes={"one": "finished"}, ended="done")
    assert cluster.task("r", "one").state == "finished"
    assert cluster.board.idle
    assert not cluster.report(order, step=10, ended="done").go_on  # it is repeated if the answer was lost


def test_a_unit_is_not_placed_again_before_its_lease_is_over_and_resumes_from_what_the_shelves_hold() -> None:
    cluster = Cluster({"a": [device("a", "x")], "b": [device("b", "y", speed=0.5)]})
    cluster.submit(request("r", [task("one")]))
    ((_, first),) = cluster.decide()
    assert first.shelf == "node-b"  # a is the coordinator's own, whose devices' checkpoints are kept elsewhere
    cluster.report(first, step=20, copy=20)
    cluster.survey("b")  # a's network is gone
    assert cluster.decide(cluster.board.lease + cluster.board.margin - 1) == []
    assert cluster.task("r", "one").state == "running"
    assert cluster.decide(2) == []
    assert cluster.task("r", "one").state == "moving"
    assert cluster.board.to_fence() == [("r/one", 1)]
    cluster.fence("r/one", cluster.copy(first, 30))  # a copy the report of which was lost
    ((where, second),) = cluster.decide()
    assert (where, second.epoch, second.restore, second.restore_from) == ("b/y", 2, "1-30", "node-b")
    assert cluster.task("r", "one").progress.step == 30
    assert not cluster.report(first, step=40, copy=40).go_on
    assert cluster.report(second, step=31).go_on
    assert cluster.task("r", "one").progress.step == 31


def test_a_unit_whose_device_was_never_answered_need_not_wait() -> None:
    cluster = Cluster({"a": [device("a", "x")], "b": [device("b", "y", speed=0.5)]})
    cluster.submit(request("r", [task("one")]))
    ((_, first),) = cluster.decide()
    cluster.board.undelivered(first.unit, first.epoch, "no such actor", cluster.now)
    ((where, second),) = cluster.decide()
    assert (where, second.epoch) == ("b/y", 2)
    assert not cluster.report(first, step=0).go_on  # the order arrived nevertheless
    cluster.report(second, step=1)
    cluster.board.undelivered(second.unit, second.epoch, "late", cluster.now)
    assert cluster.task("r", "one").state == "running"


def test_a_restarted_coordinator_counts_leases_anew_and_as_orders_named_them() -> None:
    cluster = Cluster({"a": [device("a", "x")]})
    cluster.submit(request("r", [task("one")]))
    ((_, order),) = cluster.decide()
    before = cluster.saved()
    cluster.now += 20
    cluster.report(order, step=1)  # which needs no journal
    cluster.restart(before)
    cluster.board.lease = 2.0
    cluster.survey("a")
    cluster.decide(order.lease)
    assert cluster.task("r", "one").state == "starting"
    assert cluster.report(order, step=2).go_on
    cluster.decide(order.lease + cluster.board.margin + 1)
    assert cluster.board.to_fence() == [("r/one", 1)]


def test_a_copy_of_earlier_steps_or_of_other_tasks_never_replaces_a_newer_one() -> None:
    cluster = Cluster({"a": [device("a", "x")]})
    cluster.submit(request("r", [task("one")]))
    ((_, order),) = cluster.decide()
    cluster.report(order, step=20, copy=20)
    cluster.report(order, step=20, copy=10)
    cluster.advance(100)
    other = cluster.copy(order, 99, steps={"one": 99, "two": 99}, epoch=9)
    cluster.fence("r/one", other)
    ((_, second),) = cluster.decide()
    assert second.restore == "1-20"


def test_a_process_that_failed_moves_to_another_device_and_fails_for_good_after_three() -> None:
    cluster = Cluster({name: [device(name, "x")] for name in "abcd"})
    cluster.submit(request("r", [task("one")]))
    tried = []
    for _ in range(FAILURES):
        ((where, order),) = cluster.decide()
        tried.append(where)
        cluster.report(order, step=1, ended="failed", said="it crashed")
    assert len(set(tried)) == FAILURES
    found = cluster.task("r", "one")
    assert found.state == "failed"
    assert "it crashed" in found.said
    assert cluster.decide() == []


def test_a_new_checkpoint_forgives_failures() -> None:
    cluster = Cluster({"a": [device("a", "x")]})
    cluster.submit(request("r", [task("one")]))
    for turn in range(1, 3 * FAILURES):
        ((_, order),) = cluster.decide()
        cluster.report(order, step=10 * turn, copy=10 * turn)
        cluster.report(order, step=10 * turn, ended="failed")
    assert not cluster.board.state.devices["a/x"].quarantined
    assert cluster.task("r", "one").state == "moving"


def test_cancelling() -> None:
    cluster = Cluster({"a": [device("a", "x")]})
    cluster.submit(request("r", [task("one"), task("two")], join="never"))
    ((_, order),) = cluster.decide()
    cluster.report(order, step=1)
    cluster.board.cancel("r", None, cluster.now)
    waiting = ({"one", "two"} - {order.tasks[0].name}).pop()
    assert cluster.task("r", waiting).state == "cancelled"
    assert cluster.report(order, step=2).cancel
    cluster.report(order, step=2, copy=2, final=True, ended="stopped")
    found = cluster.task("r", order.tasks[0].name)
    assert (found.state, found.results) == ("cancelled", True)
    assert cluster.board.idle
    assert cluster.decide() == []
    with pytest.raises(UserError, match="No run 'x' is known"):
        cluster.board.cancel("x", None, cluster.now)
    with pytest.raises(UserError, match="Run 'r' has no adapter 'x'"):
        cluster.board.cancel("r", "x", cluster.now)


def test_a_cancelled_unit_that_is_lost_is_not_placed_again() -> None:
    cluster = Cluster({"a": [device("a", "x")]})
    cluster.submit(request("r", [task("one")]))
    ((_, order),) = cluster.decide()
    cluster.report(order, step=1)
    cluster.board.cancel("r", "one", cluster.now)
    cluster.advance(100)
    cluster.fence("r/one")
    assert cluster.decide() == []
    assert cluster.task("r", "one").state == "cancelled"


def test_runs_that_cannot_be_taken_are_refused() -> None:
    cluster = Cluster({"a": [device("a", "x", budget=100)]})
    with pytest.raises(UserError, match=r"needs .* of device memory, but the nearest device, .*x on a"):
        cluster.submit(request("r", [task("one")], needed=101))
    with pytest.raises(UserError, match="2 adapters of run 'r' cannot be placed"):
        cluster.submit(request("r", [task("one"), task("two")], needed=101))
    with pytest.raises(UserError, match="two adapters 'one'"):
        cluster.submit(request("r", [task("one"), task("one")]))
    with pytest.raises(UserError, match="has no adapters"):
        cluster.submit(request("r", []))
    with pytest.raises(UserError, match="needs 2 devices"):
        cluster.submit(request("r", [task("one")], data_parallel=2))
    cluster.submit(request("r", [task("one")]))
    with pytest.raises(UserError, match="'r' is known already"):
        cluster.submit(request("r", [task("two")]))
    with pytest.raises(UserError, match="out/one, the output of adapter 'one', is that of an adapter of run 'r'"):
        cluster.submit(request("s", [task("one")]))
    with pytest.raises(UserError, match="one/x, the output of adapter 'x', overlaps that of an adapter of run 'r'"):
        cluster.submit(request("s", [replace(task("x"), output="out/two/../one/x")]))
    cluster.submit(request("s", [task("one")], by="another"))


def test_a_shared_folder_has_one_run_for_an_output_whoever_asks() -> None:
    cluster = Cluster({"a": [device("a", "x")]})
    cluster.submit(request("r", [task("one")], shared="/mnt", by="ann"))
    with pytest.raises(UserError, match="out/one, the output of adapter 'one', is that of an adapter of run 'r'"):
        cluster.submit(request("s", [task("one")], shared="/mnt", by="bob"))


class Half:
    """A scheduler that ends a task whose value is above 1."""

    def __init__(self, sweep: Sweep, steps: int, state: dict[str, Any] | None):
        if steps < 2:
            raise UserError("too short")
        self.seen: list[Any] = (state or {}).get("seen", [])

    def reported(self, task: str, step: int, value: float) -> list[str]:
        self.seen = [*self.seen, [task, step, value]]
        return sorted({name for name, _, value in self.seen if value > 1})

    def state(self) -> dict[str, Any]:
        return {"seen": self.seen}


def test_a_sweeps_scheduler_is_asked_once_per_result_and_goes_on_after_a_restart() -> None:
    cluster = Cluster({"a": [device("a", "x")]}, schedulers=Half)
    with pytest.raises(UserError, match="too short"):
        cluster.submit(request("r", [task("one")], steps=1, sweep=Sweep("loss", "asha")))
    cluster.submit(request("r", [task("one")], sweep=Sweep("loss", "asha")))
    ((_, order),) = cluster.decide()
    cluster.report(order, step=1, loss=0.5)
    cluster.report(order, step=1, loss=0.5)
    cluster.restart()
    assert cluster.report(order, step=2, loss=1.5).end == ["one"]
    assert cluster.board.state.runs["r"].scheduler == {"seen": [["one", 1, 0.5], ["one", 2, 1.5]]}
    cluster.report(order, step=3, copy=3, final=True, outcomes={"one": "stopped"}, ended="done")
    assert cluster.task("r", "one").state == "stopped"
    assert cluster.snapshot().runs[0].sweep == Sweep("loss", "asha")


class Second(Half):
    """A scheduler that ends `two` as soon as anything is known."""

    def reported(self, task: str, step: int, value: float) -> list[str]:
        super().reported(task, step, value)
        return ["two"]


def test_a_result_may_end_another_task() -> None:
    cluster = Cluster({"a": [device("a", "x"), device("a", "y")]}, schedulers=Second)
    cluster.submit(request("r", [task("one"), task("two")], sweep=Sweep("loss", "asha"), join="never"))
    orders = {order.tasks[0].name: order for _, order in cluster.decide()}
    assert cluster.report(orders["two"], step=0).end == []
    assert cluster.report(orders["one"], step=1, loss=0.5).end == []
    assert cluster.report(orders["two"], step=1).end == ["two"]


def test_a_run_is_forgotten_when_its_results_are_fetched_but_not_its_epochs() -> None:
    cluster = Cluster({"a": [device("a", "x")]})
    cluster.submit(request("r", [task("one")], shared="/shared"))
    ((_, order),) = cluster.decide()
    cluster.report(order, step=3, copy=3, final=True, outcomes={"one": "finished"}, ended="done")
    assert not cluster.snapshot().runs[0].over  # not written to the shared folder yet
    before = cluster.saved()
    cluster.board.cancel("r", None, cluster.now)  # it cannot be written
    assert cluster.snapshot().runs[0].over
    assert cluster.board.forgettable(cluster.now) == []
    cluster.restart(before)
    cluster.survey("a")
    cluster.board.fetched("r", "one", cluster.now)
    assert cluster.snapshot().runs[0].over
    assert cluster.board.forgettable(cluster.now) == ["r"]
    cluster.board.forget("r")
    assert cluster.snapshot().runs == []
    cluster.submit(request("r", [task("one")]))
    assert cluster.decide()[0][1].epoch == 2


def test_a_snapshot_and_the_state_are_json() -> None:
    cluster = Cluster({"a": [device("a", "x")]})
    cluster.submit(request("r", [task("one")]))
    ((_, order),) = cluster.decide()
    cluster.report(order, step=3, copy=3)
    assert from_plain(State, json.loads(json.dumps(to_plain(cluster.board.state)))) == cluster.board.state
    json.dumps(to_plain(cluster.snapshot()))
    assert from_plain(RunRequest, to_plain(cluster.board.requests["r"])) == cluster.board.requests["r"]
    assert Board(cluster.board.state, cluster.board.requests).snapshot("other", 0.0).tasks == []
