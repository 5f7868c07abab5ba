"""What becomes of runs, by events: starts, checkpoints, deaths, failures, cancelling and surveys."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cluster.fake_cluster import device_facts, node_facts

from wgpu_lora.cluster.controller import run_queue, run_state
from wgpu_lora.cluster.controller.run_state import DEATHS, FAILURES, NO_ROOM_SECONDS, ClusterState, TaskState, UnitState
from wgpu_lora.cluster.controller.state_file import read_state_file, state_bytes
from wgpu_lora.cluster.messages import Commit, Report, RunRequest, StoredFile, Task, TaskProgress
from wgpu_lora.cluster.placement.placement import place
from wgpu_lora.errors import UserError
from wgpu_lora.train.memory import RunRequirements

BUDGET, NEEDED, STEPS = 1000, 40, 100
NODES = {
    name: replace(node_facts(name, device_facts(name, budget=BUDGET, free=BUDGET, speed=1.0)), address=name)
    for name in "ab"
}
A, B = (NODES[name].devices[0].id for name in "ab")


def request(*tasks: str, name: str = "r", **changes: Any) -> RunRequest:
    plan = RunRequirements(NEEDED, base_bytes=20, base="base", data=["rows"], work=1000, steps=STEPS)
    run = [Task(task, {}, f"/{name}/{task}") for task in tasks]
    return RunRequest(name, run, {task: {"p": plan} for task in tasks}, **{"join": "never", **changes})


class Lab:
    """A state with the devices of two hosts, and what a controller does with it."""

    def __init__(self, *runs: RunRequest, nodes: str = "ab"):
        self.state, self.now = ClusterState(), 1000.0
        self.survey(nodes)
        for run in runs:
            run_state.add_run(self.state, run, self.now)

    def survey(self, nodes: str) -> None:
        run_state.take_survey(self.state, [NODES[name] for name in nodes], self.now)

    def start(self) -> list[UnitState]:
        """Place what waits."""
        waiting = run_queue.Queue().waiting_units(self.state, 1, self.now)
        units = []
        for placement in place(waiting, run_queue.candidate_devices(self.state, 1, self.now), self.now):
            units.append(run_state.join_units(self.state, placement.tasks))
            assert not any(self.state.devices[name].out for name in placement.devices)
            run_state.start_unit(self.state, units[-1], placement.devices, placement.peak_bytes, self.now)
        return units

    def start_on(self, device: str, *tasks: str) -> UnitState:
        """Start a unit on a device, or the pipeline of several tasks."""
        unit = run_state.join_units(self.state, [f"r/{name}" for name in tasks])
        run_state.start_unit(self.state, unit, [device], NEEDED, self.now)
        return unit

    def commit(self, unit: UnitState, step: int, *, generation: int | None = None, final: bool = False) -> bool:
        files = [StoredFile(f"adapters/{name}/x", "0" * 64, 1) for name in unit.tasks]
        steps = dict.fromkeys(unit.tasks, step)
        number = unit.generation if generation is None else generation
        return run_state.accept_commit(self.state, Commit(unit.id, number, steps, files, ["a", "b"], final))

    def report(self, unit: UnitState, step: int, ended: str | None = None, **more: Any) -> None:
        progress = {name: TaskProgress(step, STEPS, loss=1.0) for name in unit.tasks}
        run_state.take_report(self.state, unit, Report(progress, ended=ended, **more), self.now)

    def fail(self, unit: UnitState, device: str) -> None:
        run_state.start_unit(self.state, unit, [device], NEEDED, self.now)
        self.report(unit, 1, "failed", reason="it broke")

    def finish(self, unit: UnitState) -> None:
        self.report(unit, STEPS)
        assert self.commit(unit, STEPS, final=True)
        self.report(unit, STEPS, "done", outcomes=dict.fromkeys(unit.tasks, "finished"))

    def task(self, name: str, run: str = "r") -> TaskState:
        return self.state.tasks[f"{run}/{name}"]

    def unit(self, name: str, run: str = "r") -> UnitState:
        return self.state.units[self.task(name, run).unit]

    def view(self, name: str) -> Any:
        return next(task for task in run_queue.snapshot(self.state, None, self.now).tasks if task.name == name)

    def order(self, unit: UnitState) -> Any:
        return run_queue.order_of(self.state, unit, "id-a")


def steps_of(unit: UnitState) -> int:
    return max(unit.commit.steps.values(), default=0) if unit.commit else 0


# -- an actor's life ---------------------------------------------------------------------------------------------------


def test_a_run_ends_when_all_of_its_tasks_have() -> None:
    lab = Lab(request("one", "two"))
    first, second = lab.start()
    assert {first.devices[0], second.devices[0]} == {A, B}
    assert [lab.state.devices[name].free for name in (A, B)] == [BUDGET - NEEDED] * 2
    assert lab.start() == []
    lab.finish(first)
    assert not lab.state.runs["r"].ended
    lab.finish(second)
    assert lab.state.runs["r"].ended == lab.now
    assert [(task.state, task.results) for task in lab.state.tasks_of("r")] == [("finished", True)] * 2
    assert [device.free for device in lab.state.devices.values()] == [BUDGET] * 2
    assert lab.state.hosts["a"].bases == lab.state.hosts["b"].bases == ["base"]
    assert "all adapters have ended" in lab.state.events[-1].text


def test_a_shared_run_is_over_when_its_results_are_in_place_or_it_is_cancelled() -> None:
    for end in ("fetched", "cancelled"):
        lab = Lab(request("one", shared="/mnt"))
        lab.finish(lab.start()[0])
        assert not lab.state.runs["r"].ended
        if end == "fetched":
            lab.task("one").fetched = True
            run_state.settle_run(lab.state, "r", lab.now)
        else:
            run_state.cancel_run(lab.state, "r", None, lab.now)
        assert lab.state.runs["r"].ended


def test_a_lost_actor_is_resumed_from_the_newest_commit_and_may_commit_no_more() -> None:
    lab = Lab(request("one"))
    (unit,) = lab.start()
    assert lab.commit(unit, 10)
    lab.report(unit, 17)
    run_state.lose_unit(lab.state, unit, "its node was lost", lab.now)
    assert not lab.commit(unit, 20)  # while it waits
    assert (lab.task("one").state, lab.task("one").progress.step) == ("moving", 10)
    assert lab.view("one").reason == "its node was lost"
    (again,) = lab.start()
    assert (again.generation, lab.order(again).resume) == (2, unit.commit)
    for generation in (0, 1, 3):
        assert not lab.commit(again, 30, generation=generation)
    assert steps_of(again) == 10
    lab.finish(again)
    assert (lab.task("one").state, lab.task("one").attempts) == ("finished", 2)
    assert not lab.commit(again, STEPS + 1)  # it has ended


def test_a_unit_waits_for_the_only_hosts_that_have_its_checkpoint() -> None:
    lab = Lab(request("one"))
    (unit,) = lab.start()
    assert lab.commit(unit, 10)
    assert unit.commit
    unit.commit = replace(unit.commit, hosts=["b"])
    run_state.lose_unit(lab.state, unit, "its node was lost", lab.now)
    lab.survey("a")
    assert lab.start() == []
    assert lab.view("one").reason == "waits for the host b, which has its newest checkpoint"
    lab.survey("ab")
    assert lab.start() == [unit]


@pytest.mark.parametrize(("kind", "count"), [("failed", FAILURES), ("death", DEATHS)])
@pytest.mark.parametrize("step", [0, 10])
def test_interruptions_in_a_row_give_up_with_the_checkpoint_as_the_result(kind: str, count: int, step: int) -> None:
    lab = Lab(request("one"))

    def interrupt(times: int) -> UnitState:
        for _ in range(times):
            (unit,) = lab.start()
            lab.report(unit, step + 1)
            if kind == "failed":
                lab.report(unit, step + 1, "failed", reason="it broke")
            else:
                run_state.lose_unit(lab.state, unit, "it broke", lab.now)
        return lab.unit("one")

    interrupt(count - 1)
    if step:  # a newer checkpoint begins a new count
        assert lab.commit(lab.start()[0], step)
        run_state.wait_again(lab.state, lab.unit("one"), lab.now, "")
        interrupt(count - 1)
    assert not lab.task("one").over
    unit = interrupt(1)
    task = lab.task("one")
    assert (task.state, task.results, unit.phase) == ("failed", bool(step), "done")
    assert task.reason == f"interrupted {count} times in a row without a new checkpoint, at last since it broke"
    assert lab.state.runs["r"].ended


def test_ends_that_do_not_count_or_begin_anew() -> None:
    lab = Lab(request("one"))
    for _ in range(2 * DEATHS):
        (unit,) = lab.start()
        device = unit.devices[0]
        lab.report(unit, 0, "no room", reason="others hold its memory")
        assert unit.avoid[device] == lab.now + NO_ROOM_SECONDS
        (other,) = lab.start()
        assert other.devices[0] != device
        lab.report(other, 0, "no room")
        assert lab.start() == []
        lab.now += NO_ROOM_SECONDS + 1
    assert (lab.task("one").deaths, lab.task("one").failed_on) == (0, [])
    (unit,) = lab.start()
    assert lab.commit(unit, 10)
    lab.report(unit, 12, "no checkpoint", reason="no host has it")
    assert (unit.commit, lab.task("one").progress.step) == (None, 0)
    assert lab.order(lab.start()[0]).resume is None
    lab.report(unit, 1, "refused", reason="--lora-r is wrong")
    assert (lab.task("one").state, lab.task("one").reason) == ("failed", "--lora-r is wrong")


@pytest.mark.parametrize("outcome", ["finished", "stopped early", "failed", "interrupted"])
def test_outcomes_are_states(outcome: str) -> None:
    lab = Lab(request("one"))
    (unit,) = lab.start()
    lab.commit(unit, 50, final=True)
    lab.report(unit, 50, "done", outcomes={"one": outcome})
    state = {"finished": "finished", "stopped early": "stopped"}.get(outcome, "failed")
    assert (lab.task("one").state, lab.task("one").results) == (state, True)
    assert bool(lab.task("one").reason) == (state != "finished")


def test_an_end_without_its_results_is_a_failure() -> None:
    lab = Lab(request("one"))
    (unit,) = lab.start()
    lab.report(unit, STEPS, "done", outcomes={"one": "finished"})
    assert (lab.task("one").state, lab.task("one").failed_on) == ("moving", [A])
    assert lab.commit(lab.start()[0], STEPS, final=True)
    run_state.lose_unit(lab.state, unit, "its node was lost", lab.now)
    assert lab.start() == [unit]  # the final commit of an older generation is no end
    lab.report(unit, STEPS, "done", outcomes={"one": "finished"})
    assert lab.task("one").state == "moving"


# -- devices -----------------------------------------------------------------------------------------------------------


def test_a_device_on_which_jobs_fail_is_quarantined_unless_they_fail_elsewhere() -> None:
    lab = Lab(request("one", "two", "three"))
    lab.fail(lab.unit("one"), A)
    assert not lab.state.devices[A].quarantined
    lab.fail(lab.unit("two"), A)
    assert lab.state.devices[A].quarantined
    assert f"cluster release {A}' uses it again" in lab.state.events[-1].text
    assert all(unit.devices == [B] for unit in lab.start())
    (unit,) = lab.state.placed()
    lab.report(unit, 1, "failed")
    assert not lab.state.devices[A].quarantined  # it is the task's fault
    assert [lab.state.devices[name].failures for name in (A, B)] == [0, 0]


def test_a_quarantined_device_is_released_by_a_person_and_a_checkpoint_ends_the_count() -> None:
    lab = Lab(request("one", "two"))
    lab.fail(lab.unit("one"), A)
    run_state.start_unit(lab.state, lab.unit("two"), [A], NEEDED, lab.now)
    assert lab.commit(lab.unit("two"), 5)
    lab.report(lab.unit("two"), 6, "failed")
    assert (lab.state.devices[A].failures, lab.state.devices[A].quarantined) == (1, False)
    lab.fail(lab.unit("two"), A)
    assert lab.state.devices[A].quarantined
    run_state.release_device(lab.state, A, lab.now)
    assert (lab.state.devices[A].failures, lab.state.devices[A].quarantined) == (0, False)
    with pytest.raises(UserError, match="No device zork is quarantined"):
        run_state.release_device(lab.state, "zork", lab.now)


def test_memory_speeds_and_absence() -> None:
    lab = Lab(request("one"))
    (unit,) = lab.start()
    lab.survey("ab")  # it has not loaded, so it has no lease that the survey sees
    assert lab.state.devices[unit.devices[0]].free == BUDGET - NEEDED
    lab.report(unit, 1)
    lab.survey("ab")
    assert lab.state.devices[unit.devices[0]].free == BUDGET
    lab.survey("b")
    assert [device.out for device in lab.state.devices.values()] == ["gone", ""]
    run_state.lose_unit(lab.state, unit, "its node was lost", lab.now)
    assert lab.state.devices[A].free == BUDGET  # the survey counted its bytes as free already
    assert lab.start()[0].devices == [B]
    lab.finish(unit)
    lab.survey("b")
    assert [*lab.state.devices] == [B]  # nothing names the other any more
    run_state.take_speed(lab.state, B, 7.0, 1.5)
    assert (lab.state.devices[B].facts.speed, run_state.devices_to_measure(lab.state, lab.now)) == (
        7.0,
        [(B, "id-b", lab.state.devices[B].facts.key)],
    )


def test_a_device_on_which_no_actor_starts_is_not_tried_again_at_once() -> None:
    lab = Lab(request("one"), nodes="a")
    (unit,) = lab.start()
    run_state.lose_unit(lab.state, unit, "its actor has not started", lab.now)
    assert lab.start() == []
    lab.now += NO_ROOM_SECONDS + 1
    lab.report(lab.start()[0], 0)
    run_state.lose_unit(lab.state, unit, "its process ended", lab.now)
    assert lab.start() == [unit]


# -- pipelines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("ended", ["refused", "failed"])
def test_a_pipeline_that_cannot_go_on_is_split(ended: str, committed: bool) -> None:
    lab = Lab(request("one", "two", "three", join="always"), nodes="a")
    (unit,) = lab.start()
    assert sorted(unit.tasks) == ["one", "three", "two"]
    if committed:
        lab.commit(unit, 10)
    for _ in range(1 if ended == "refused" else FAILURES):
        if unit.phase == "waiting":
            run_state.start_unit(lab.state, unit, [A], NEEDED, lab.now)
        lab.report(unit, 11, ended, reason="one of them is wrong")
        if not committed:
            break
    if committed:  # it trained before, so that all of them have a result
        assert {(task.state, task.results) for task in lab.state.tasks_of("r")} == {("failed", True)}
        return
    units = {task.name: lab.unit(task.name) for task in lab.state.tasks_of("r")}
    assert {name: item.tasks for name, item in units.items()} == {name: [name] for name in ("one", "two", "three")}
    assert all(item.commit is None and item.phase == "waiting" for item in units.values())
    assert units["one"].generation == unit.generation  # its id goes on
    assert {task.alone for task in lab.state.tasks_of("r")} == {ended == "refused"}
    assert {task.progress.step for task in lab.state.tasks_of("r")} == {0}


@pytest.mark.parametrize("end", ["no room", "death"])
def test_a_pipeline_without_a_checkpoint_is_split_without_its_cancelled_tasks(end: str) -> None:
    lab = Lab(request("one", "two", "three", join="always"), nodes="a")
    (unit,) = lab.start()
    run_state.cancel_run(lab.state, "r", "two", lab.now)
    if end == "death":
        run_state.lose_unit(lab.state, unit, "its process ended", lab.now)
    else:
        lab.report(unit, 0, end)
    assert {task.name: task.state for task in lab.state.tasks_of("r")} == {
        "one": "moving",
        "two": "cancelled",
        "three": "moving",
    }
    lab.now += NO_ROOM_SECONDS + 1
    assert len(lab.start()[0].tasks) == (2 if end == "death" else 1)  # what had no room is not joined again


def test_a_task_of_a_pipeline_may_end_before_the_others() -> None:
    lab = Lab(request("one", "two", join="always"), nodes="a")
    (unit,) = lab.start()
    lab.report(unit, 5, outcomes={"one": "stopped early"})
    assert lab.view("one").progress.doing == "stopped early; its pipeline goes on"
    run_state.cancel_run(lab.state, "r", "two", lab.now)
    lab.commit(unit, 9, final=True)
    lab.report(unit, 9, "done", outcomes={"one": "stopped early", "two": "stopped"})
    assert [task.state for task in lab.state.tasks_of("r")] == ["stopped", "cancelled"]


# -- cancelling and forgetting -----------------------------------------------------------------------------------------


def test_cancelling() -> None:
    lab = Lab(request("one", "two"), nodes="a")
    (unit,) = lab.start()
    waits = next(task for task in lab.state.tasks_of("r") if task.name not in unit.tasks)
    lab.commit(unit, 10)
    run_state.cancel_run(lab.state, "r", None, lab.now)
    assert (waits.state, waits.results) == ("cancelled", False)  # at once
    (task,) = lab.state.members(unit)
    assert (task.state, task.ending, lab.state.runs["r"].ended) == ("starting", "cancelled", 0)
    lab.commit(unit, 12, final=True)
    lab.report(unit, 12, "stopped", outcomes={task.name: "interrupted"})
    assert (task.state, task.results, bool(lab.state.runs["r"].ended)) == ("cancelled", True, True)
    for run, name, words in (
        ("s", None, "No run 's' is known"),
        ("r", "three", "no adapter 'three': its adapters are"),
    ):
        with pytest.raises(UserError, match=words):
            run_state.cancel_run(lab.state, run, name, lab.now)


@pytest.mark.parametrize("end", ["death", "stopped", "failed", "no room"])
def test_what_was_cancelled_is_not_started_again(end: str) -> None:
    lab = Lab(request("one"))
    (unit,) = lab.start()
    lab.commit(unit, 10)
    run_state.cancel_run(lab.state, "r", "one", lab.now)
    if end == "death":
        run_state.lose_unit(lab.state, unit, "its process ended", lab.now)
    else:
        lab.report(unit, 11, end)
    assert (lab.task("one").state, lab.task("one").results) == ("cancelled", True)
    assert lab.start() == []
    assert lab.state.runs["r"].ended


def test_a_run_that_is_forgotten_leaves_its_generations() -> None:
    lab = Lab(request("one"))
    (unit,) = lab.start()
    lab.finish(unit)
    assert run_state.forgettable_runs(lab.state, lab.now) == []  # nobody has fetched its result
    assert run_state.forgettable_runs(lab.state, lab.now + run_state.RETAIN_SECONDS + 1) == ["r"]
    lab.task("one").fetched = True
    assert run_state.forgettable_runs(lab.state, lab.now) == ["r"]
    run_state.forget_run(lab.state, "r")
    assert not lab.state.tasks | lab.state.units | lab.state.runs | lab.state.requests
    run_state.add_run(lab.state, request("one"), lab.now)
    (again,) = lab.start()
    assert again.generation == 2
    assert not lab.commit(again, 50, generation=1)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (request("x"), "A run 'r' is known already"),
        (request(name="s"), "has no adapters"),
        (request("x", "x", name="s"), "two adapters 'x'"),
        (replace(request("x", name="s"), plans={}), "'x' has no memory plan"),
        (
            replace(request("x", name="s"), tasks=[Task("x", {}, "/r/one")]),
            "/r/one, .* is that of an adapter of run 'r'",
        ),
        (replace(request("x", name="s"), tasks=[Task("x", {}, "/r")]), "overlaps that of"),
        (replace(request("x", name="s"), tasks=[Task("x", {}, "/r/a/../one/z")]), "overlaps that of"),
    ],
)
def test_runs_that_are_refused(run: RunRequest, words: str) -> None:
    lab = Lab(request("one"))
    with pytest.raises(UserError, match=words):
        run_state.check_run(lab.state, run)
    run_state.check_run(lab.state, request("one", name="other", by="somebody else"))


def test_the_state_file_has_all_of_it(tmp_path: Path) -> None:
    lab = Lab(request("one", "two", join="always"), request("three", name="s", shared="/mnt"), nodes="ab")
    lab.start()
    lab.commit(lab.unit("one"), 10)
    lab.report(lab.unit("one"), 12)
    run_state.cancel_run(lab.state, "s", None, lab.now)
    file = tmp_path / "state.json"
    file.write_bytes(state_bytes(lab.state))
    assert read_state_file(file) == lab.state
    lab.task("one").progress = TaskProgress(3, loss=float("nan"))
    file.write_bytes(state_bytes(lab.state))
    assert read_state_file(file).tasks["r/one"].progress.loss is None
    file.write_text(json.dumps({"version": 1}))
    with pytest.raises(ValueError, match="another version"):
        read_state_file(file)


# -- any events --------------------------------------------------------------------------------------------------------

ENDS = ("done", "failed", "refused", "no room", "no checkpoint", "stopped")
EVENTS = st.sampled_from(("start", "start", "report", "commit", "commit", "stale", "death", *ENDS, "cancel", "survey"))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(EVENTS, st.integers(0, 6), st.integers(0, 9)), max_size=80), st.sampled_from(("never", "always"))
)
def test_what_holds_after_any_events(events: Sequence[tuple[str, int, int]], join: str) -> None:
    lab = Lab(request("one", "two", "three", join=join), request("four", name="s"))
    for kind, index, number in events:
        lab.now += 5.0 * number
        before = {unit.id: (unit.tasks, unit.commit) for unit in lab.state.units.values()}
        placed = [*lab.state.placed()]
        unit = placed[index % len(placed)] if placed else None
        if kind == "start":
            lab.start()
        elif kind == "cancel":
            names = [None, "one", "two"]
            run_state.cancel_run(lab.state, "r", names[index % 3], lab.now)
        elif kind == "survey":
            lab.survey(("ab", "a", "b", "")[index % 4])
        elif unit and kind in ("commit", "done"):
            assert lab.commit(unit, steps_of(unit) + number, final=kind == "done")
            if kind == "done":
                lab.report(unit, STEPS, "done", outcomes=dict.fromkeys(unit.tasks, "finished"))
        elif unit and kind == "stale":
            assert not lab.commit(unit, STEPS, generation=unit.generation - 1 - number)
        elif unit and kind == "death":
            run_state.lose_unit(lab.state, unit, "its process ended", lab.now)
        elif unit:
            lab.report(unit, steps_of(unit) + number, kind if kind in ENDS else None)
        check(lab.state)
        for name, (tasks, commit) in before.items():
            after = lab.state.units.get(name)
            if commit and after and after.tasks == tasks and kind != "no checkpoint":
                assert after.commit
                assert all(after.commit.steps[task] >= commit.steps[task] for task in tasks)
                assert after.commit.generation >= commit.generation


def check(state: ClusterState) -> None:
    members = Counter(f"{unit.run}/{name}" for unit in state.units.values() for name in unit.tasks)
    for task in state.tasks.values():
        assert members[task.id] == 1
        assert task.name in state.units[task.unit].tasks
        assert task.over == (state.units[task.unit].phase == "done")
        assert not (task.results and state.units[task.unit].commit is None)
    used = Counter(name for unit in state.placed() for name in unit.devices)
    assert all(count == 1 for count in used.values())
    for unit in state.units.values():
        assert bool(unit.devices) == (unit.phase == "placed")
        assert unit.generation <= state.generations.get(unit.id, 0)
    for device in state.devices.values():
        assert device.free is not None
        assert 0 <= device.free <= BUDGET
    for run in state.runs.values():
        assert bool(run.ended) == all(task.over for task in state.tasks_of(run.name))
