"""Following a run: what is shown, what is fetched, and when it ends."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cluster.fake_cluster import FakeCluster, device_facts, node_facts, snapshot, task_view

from wgpu_lora.cli.cluster.run_table import Table, report, show_status
from wgpu_lora.cluster.cluster_connection import ClusterGone
from wgpu_lora.cluster.cluster_file import SweepOptions
from wgpu_lora.cluster.messages import EventLine, Snapshot
from wgpu_lora.cluster.run_status import PATIENCE, Followed, follow
from wgpu_lora.errors import UserError

DEVICE = device_facts("10.0.0.4")
NODE = replace(node_facts("beta", DEVICE), address="10.0.0.4")


class Clock:
    """Time that passes only in `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Seen:
    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        self.absences: list[float] = []
        self.fetches: list[str] = []
        self.unwritten: list[tuple[str, str]] = []

    def update(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)

    def away(self, seconds: float) -> None:
        self.absences.append(seconds)

    def fetching(self, task: str) -> None:
        self.fetches.append(task)

    def not_fetched(self, task: str, why: str) -> None:
        self.unwritten.append((task, why))


def followed(cluster: FakeCluster, watching: Any = None, **more: Any) -> Followed:
    clock = Clock()
    return follow(cluster, "r", watching or Seen(), clock=clock, sleep=clock.sleep, **more)


def test_results_are_fetched_as_they_end(tmp_path: Path) -> None:
    a, b = task_view("a", output=str(tmp_path / "a")), task_view("b", output=str(tmp_path / "b"))
    cluster = FakeCluster(
        snapshots=[
            snapshot(a, b),
            snapshot(replace(a, state="finished"), b),
            snapshot(replace(a, state="finished"), replace(b, state="stopped"), over=True),
        ],
        files={"a": {"x": b"1"}},
    )
    cluster.files["b"] = {"y": b"2"}
    events = Seen()
    result = followed(cluster, events)
    assert (tmp_path / "a/x").read_bytes() == b"1"
    assert (tmp_path / "b/y").read_bytes() == b"2"
    assert result.code == 0
    assert events.fetches == ["a", "b"]
    assert [len(s.tasks) for s in events.snapshots] == [2, 2, 2]


def test_a_shared_folder_needs_no_fetching() -> None:
    cluster = FakeCluster(snapshots=[snapshot(task_view("a", "finished"), over=True)], files={"a": {"x": b"1"}})
    assert followed(cluster, fetches=False).code == 0
    assert not [call for call in cluster.calls if call[1] == "results"]


def test_failed_tasks_make_the_exit_code_1(tmp_path: Path) -> None:
    tasks = task_view("a", "finished", output=str(tmp_path / "a")), task_view("b", "failed", fetched=True)
    result = followed(FakeCluster(snapshots=[snapshot(*tasks, over=True)], files={"a": {"x": b"1"}}))
    assert result.code == 1


def test_a_result_that_has_no_place_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("in the way")
    cluster = FakeCluster(
        snapshots=[snapshot(task_view("a", "finished", output=str(tmp_path / "a")), over=True)], files={"a": {"x": b""}}
    )
    result = followed(cluster)
    assert result.code == 1
    assert "holds something else" in result.wrong["a"]


def test_a_result_on_a_host_that_is_away_is_waited_for(tmp_path: Path) -> None:
    ended = snapshot(task_view("a", "finished", output=str(tmp_path / "a")), over=True)
    cluster = FakeCluster(snapshots=[ended])
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if clock.now > 5:
            cluster.files["a"] = {"x": b"1"}

    assert follow(cluster, "r", Seen(), clock=clock, sleep=sleep).code == 0
    assert clock.now > 5


def test_a_restarted_controller_is_waited_for() -> None:
    cluster = FakeCluster(snapshots=[None] * 5 + [snapshot(task_view("a", "stopped", fetched=True), over=True)])
    events = Seen()
    assert followed(cluster, events).code == 0
    assert len(events.absences) == 5


def test_a_cluster_that_stays_away_is_given_up() -> None:
    events = Seen()
    with pytest.raises(ClusterGone, match=r"has not answered for \d+ s, its jobs may go on .*: attach again later"):
        followed(FakeCluster(snapshots=[None]), events)
    assert events.absences[-1] <= PATIENCE


def test_an_unknown_run_is_refused() -> None:
    with pytest.raises(UserError, match="No run r"):
        followed(FakeCluster(snapshots=[replace(snapshot(), runs=[])]))


# -- what people see ---------------------------------------------------------------------------------------------------


def test_lines_for_pipes(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("r")
    running = task_view("a", step=2, loss=1.5, eval_loss=2.0, tokens_per_second=1234.0, device=DEVICE.id)
    event = EventLine(1.0, "a moves to beta")
    table.update(snapshot(running, nodes=(NODE,), events=[event]))
    table.update(snapshot(replace(running, progress=replace(running.progress, step=3)), nodes=(NODE,), events=[event]))
    table.update(snapshot(replace(running, state="failed", reason="no luck"), nodes=(NODE,), events=[event]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("event ")
    assert lines[0].endswith("a moves to beta")
    assert lines[1] == "running   a  2/10  loss 1.5000  held-out 2.0000  1,234 tokens/s  on beta:0"
    assert lines[2] == "failed    a  2/10  loss 1.5000  held-out 2.0000  on beta:0  no luck"
    assert len(lines) == 3  # a step within seconds is not worth a line, and an event is said once


def test_the_table_is_bounded_and_shows_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", "20")
    monkeypatch.setenv("COLUMNS", "120")
    tasks = [task_view(f"done-{i}", "finished") for i in range(500)]
    tasks += [task_view("[red]odd", "running", loss=2.0, tokens_per_second=10.0, device=DEVICE.id)]
    text = rendered(Table("r").table(snapshot(*tasks, nodes=(NODE,))))
    assert len(text.splitlines()) <= 20
    assert text.splitlines()[1].startswith("[red]odd")  # names are no markup, and what runs comes first
    assert "and 491 more; 1 running, 500 finished, 10 tokens/s\nbeta:0 llvmpipe" in text


def rendered(table: Any) -> str:
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=120).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


AWAY = "its results are not in /mnt/lab/a yet: /mnt/lab/a exists already, with other files: move it away."


def test_a_result_that_cannot_be_put_in_place_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    waits = task_view("a", "finished", 10, reason=AWAY)
    placed = task_view("b", "finished", 10, fetched=True, reason="of no interest any more")
    state = snapshot(waits, placed, nodes=(NODE,))
    assert f"a: {AWAY[:50]}" in rendered(Table("r").table(state))
    for show_it in (Table("r").update, lambda view: report(Followed(view)), show_status):
        show_it(state)
        output = capsys.readouterr().out
        assert AWAY in output
        assert "of no interest" not in output


def test_a_helper_that_refuses_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    why = "10.0.0.5: the rows differ from those of the leader"
    running = [task_view(name, reason=why, device=DEVICE.id) for name in ("a", "b", "c")]
    many = [task_view(f"waits-{number}", "pending", reason=f"reason {number}") for number in range(100)]
    state = snapshot(*many, *running, nodes=(NODE,))
    assert f"a and 2 others: {why}" in " ".join(rendered(Table("r").table(state)).split())  # lines may be broken
    Table("r").update(state)
    assert capsys.readouterr().out.count(why) == 3
    show_status(state)
    output = capsys.readouterr().out
    assert f"running   r/a and 2 others: {why}" in output
    assert "and       91 more reasons" in output


def test_what_could_not_be_written_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").write_text("in the way")
    ended, going = task_view("a", "finished", output=str(tmp_path / "a")), task_view("b")
    over = snapshot(ended, replace(going, state="cancelled", fetched=True), over=True)
    cluster = FakeCluster(files={"a": {"x": b"1"}}, snapshots=[snapshot(ended, going)] * 3 + [over])
    events = Seen()
    assert followed(cluster, events).code == 1
    ((task, why),) = events.unwritten  # once
    assert task == "a"
    Table("r").not_fetched(task, why)
    assert "a: its result stays on the cluster" in capsys.readouterr().out


def test_a_terminal_gets_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", out)
    with Table("r") as table:
        table.update(snapshot(task_view("a", loss=1.0), nodes=(NODE,)))
        table.fetching("a")
        table.away(30)
    assert "a" in out.getvalue()
    assert "no answer from the cluster for 30 s" in out.getvalue()


def test_the_end_is_a_leaderboard(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tasks = (
        task_view("worse", "finished", 10, loss=1.0, eval_loss=3.0, output=str(tmp_path / "worse")),
        task_view("gone", "failed", reason="the loss is not finite", output=str(tmp_path / "gone")),
        task_view("better", "finished", 10, loss=1.0, eval_loss=2.0, attempts=2, output=str(tmp_path / "better")),
    )
    report(Followed(snapshot(*tasks, over=True), {"worse": "the disk is full"}))
    output = capsys.readouterr().out
    lines = output.splitlines()
    ranks = [line.split()[1] for line in lines if line[:1].isdigit()]  # long paths are folded
    assert ranks == ["better", "worse", "gone"]
    assert "failed    gone: the loss is not finite" in output
    assert "moved     better began again from the last copy" in output
    assert "kept      worse: its result stays on the cluster: the disk is full" in output


def test_the_end_of_a_sweep_has_its_parameters(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tasks = [
        task_view(
            f"t{rank}", "finished", 10, loss=float(rank), params={"lora_r": rank}, output=str(tmp_path / f"t{rank}")
        )
        for rank in (8, 4)
    ]
    state = snapshot(*tasks, over=True)
    report(Followed(replace(state, runs=[replace(state.runs[0], sweep=SweepOptions(metric="loss"))])))
    lines = capsys.readouterr().out.splitlines()
    assert "lora_r" in lines[0]
    assert lines[1].split()[1:3] == ["t4", "4"]
    assert (tmp_path / "sweep.json").is_file()
