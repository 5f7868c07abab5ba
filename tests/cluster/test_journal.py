"""What the coordinator wrote is what the next one goes on from, whatever happened to the files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.cluster import Cluster, device, request, task

from wgpu_lora.cluster.coordinator import journal as module
from wgpu_lora.cluster.coordinator.journal import RUNS, STATE, Journal, unfinished
from wgpu_lora.cluster.coordinator.state import State
from wgpu_lora.errors import UserError


def running(name: str = "r") -> Cluster:
    """A cluster with a unit that has a copy."""
    cluster = Cluster({"a": [device("a", "x")]})
    cluster.submit(request(name, [task("one")]))
    ((_, order),) = cluster.decide()
    cluster.report(order, step=3, copy=3)
    return cluster


def write(journal: Journal, cluster: Cluster) -> None:
    for one in cluster.board.requests.values():
        journal.add(one)
    journal.write(cluster.board.state)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    cluster, journal = running(), Journal(tmp_path)
    assert journal.read() is None
    write(journal, cluster)
    journal.close()
    again = Journal(tmp_path)
    assert again.read() == (cluster.board.state, cluster.board.requests)
    cluster.board.cancel("r", None, cluster.now)
    cluster.advance(100)
    cluster.fence("r/one")
    cluster.board.forget("r")
    again.write(cluster.board.state)
    again.forget("r")
    assert list((tmp_path / RUNS).iterdir()) == []
    state, requests = again.read() or (State(), {})
    assert (state.runs, requests) == ({}, {})
    assert state.epochs == {"r/one": 1}  # a run of that name must not repeat them
    again.close()


def test_runs_that_are_not_over(tmp_path: Path) -> None:
    cluster, journal = running(), Journal(tmp_path)
    assert unfinished(tmp_path) == []
    write(journal, cluster)
    assert unfinished(tmp_path) == ["r"]
    cluster.board.cancel("r", None, cluster.now)
    cluster.advance(100)
    cluster.fence("r/one")
    write(journal, cluster)
    assert unfinished(tmp_path) == ["r"]  # its results can be fetched
    cluster.board.fetched("r", "one", cluster.now)
    write(journal, cluster)
    assert unfinished(tmp_path) == []
    (tmp_path / STATE).write_text("[]")
    assert unfinished(tmp_path) == []
    journal.close()


def test_losses_that_are_not_finite_are_none(tmp_path: Path) -> None:
    cluster, journal = running(), Journal(tmp_path)
    one = cluster.task("r", "one")
    one.progress = replace(one.progress, loss=float("nan"), eval_loss=0.5)
    write(journal, cluster)
    state, _ = journal.read() or (State(), {})
    assert (state.tasks["r/one"].progress.loss, state.tasks["r/one"].progress.eval_loss) == (None, 0.5)
    journal.close()


def test_only_one_coordinator_has_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.1)
    journal = Journal(tmp_path)
    with pytest.raises(UserError, match="used by the coordinator of another cluster: set WGPU_LORA_CLUSTER_DIR"):
        Journal(tmp_path)
    journal.close()
    Journal(tmp_path).close()


@pytest.mark.parametrize(
    "damage", ["{", '{"version": 1}', '{"version": 99, "state": {}}', "[]", '{"version": 1, "state": 3}']
)
def test_a_damaged_state_is_refused_and_can_be_set_aside(tmp_path: Path, damage: str) -> None:
    journal = Journal(tmp_path)
    (tmp_path / STATE).write_text(damage)
    with pytest.raises(UserError, match=r"state\.json cannot be read"):
        journal.read()
    assert journal.set_aside().read_text() == damage
    assert journal.read() is None
    journal.close()


def test_a_run_without_its_request_is_left_out(tmp_path: Path) -> None:
    cluster, journal = running(), Journal(tmp_path)
    cluster.submit(request("other", [task("two")], by="another"))
    write(journal, cluster)
    (tmp_path / RUNS / "r.json").write_text(json.dumps({"name": 3}))
    state, requests = journal.read() or (State(), {})
    assert set(state.runs) == set(requests) == {"other"}
    assert set(state.tasks) == set(state.units) == {"other/two"}
    journal.close()


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    left = tmp_path / f".{STATE}.abcdefgh.tmp"
    left.write_text("half")
    Journal(tmp_path).close()
    assert not left.exists()


def test_the_name_of_a_run_is_no_path(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    with pytest.raises(UserError, match="cannot be the name of a run"):
        journal.add(request("../r", [task("one")]))
    journal.close()


def test_the_directory_must_be_writable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        Journal(tmp_path / "file" / "journal")
