"""The coordinator's decisions under any sequence of losses, late messages and restarts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.cluster import Cluster, device, request, task

from wgpu_lora.cluster.coordinator.board import Board
from wgpu_lora.cluster.coordinator.runs import tasks_of
from wgpu_lora.cluster.coordinator.state import OVER, State
from wgpu_lora.cluster.facts import Answer, Copy, Order, Progress, Report, from_plain, to_plain

STEPS = 40


@dataclass
class Process:
    """What a device has of an order. Nothing runs before an answer, nor `lease` after an answered report was sent.

    sent: when the last one was, by the device. copy: not reported yet. ended: what it reports until it is answered.
    """

    order: Order
    device: str
    steps: dict[str, int]
    sent: float | None = None
    copy: Copy | None = None
    ended: str | None = None
    dead: bool = False
    forgotten: bool = False
    asked: set[str] = field(default_factory=set)

    def alive(self, now: float) -> bool:
        running = self.sent is not None and not self.dead and self.ended is None
        return running and now - (self.sent or 0.0) < self.order.lease

    def report(self) -> Report:
        progress = {name: Progress(step, STEPS) for name, step in self.steps.items()}
        outcomes = {name: "stopped" if name in self.asked else "finished" for name in self.steps}
        done = outcomes if self.ended == "done" else {}
        return Report(self.order.unit, self.order.epoch, progress, {}, self.copy, done, self.ended, "")


class Chaos:
    """Three hosts; `a` is the coordinator's. What leaves the board has been saved before, as the actor does."""

    def __init__(self) -> None:
        hosts = {name: [device(name, "x", joined_speedup=2.0)] for name in "abc"}
        self.cluster = Cluster(hosts)
        self.processes: list[Process] = []
        self.late: list[tuple[str, Order]] = []
        self.reports: list[tuple[Process, Report, float]] = []
        self.fences: dict[tuple[str, str], int] = {}  # (host, unit) -> the oldest epoch that may copy
        self.shelves: dict[tuple[str, str], Copy] = {}
        self.known: dict[str, Copy] = {}  # by digest
        self.accepted: dict[str, dict[str, int]] = {}  # steps of copies that the board has been told of, by unit
        self.epochs: dict[str, int] = {}
        self.ended: dict[str, str] = {}
        self.saved, self.written = "", -1

    @property
    def now(self) -> float:
        return self.cluster.now

    @property
    def board(self) -> Board:
        return self.cluster.board

    def save(self) -> None:
        if self.board.changes != self.written:
            self.saved, self.written = json.dumps(to_plain(self.board.state)), self.board.changes

    def chosen(self, choice: int, fits: Callable[[Process], bool]) -> Process | None:
        found = [process for process in self.processes if not process.forgotten and fits(process)]
        return found[choice % len(found)] if found else None

    def submit(self, joined: bool, count: int) -> None:
        tasks = [task(f"t{number}") for number in range(count)]
        self.cluster.submit(request("r", tasks, steps=STEPS, join="always" if joined else "never"))
        self.save()

    # -- messages ------------------------------------------------------------------------------------------------------

    def decide(self, arrives: bool) -> None:
        orders = self.cluster.decide()
        self.save()
        for name, order in orders:
            assert order.epoch > self.epochs.get(order.unit, 0), "epochs only grow"
            self.epochs[order.unit] = order.epoch
            self.resumes(order)
            if arrives:
                self.take(name, order)
            else:
                self.late.append((name, order))

    def resumes(self, order: Order) -> None:
        """An order resumes from the newest copy that the board has been told of, or an even newer one."""
        if order.restore is None:  # it begins anew
            for one in order.tasks:
                self.accepted.pop(f"r/{one.name}", None)
            return
        steps = self.known[order.restore].steps
        if any("cannot go on" in line.text for line in self.board.state.events):  # its copy was damaged, or is gone
            self.accepted.pop(order.unit, None)
        for name, step in self.accepted.get(order.unit, {}).items():
            assert steps[name] >= step, "steps since the last copy alone are lost"

    def take(self, name: str, order: Order) -> None:
        """A device gets an order, with the steps of the copy to resume from."""
        steps = dict.fromkeys((one.name for one in order.tasks), 0)
        if order.restore is not None:
            steps |= self.known[order.restore].steps
        self.processes.append(Process(order, name, steps))

    def late_order(self, choice: int, told: bool) -> None:
        if self.late:
            name, order = self.late.pop(choice % len(self.late))
            if told:
                self.board.undelivered(order.unit, order.epoch, "no answer", self.now)
                self.save()
            self.take(name, order)

    def beat(self, choice: int, fate: str) -> None:
        process = self.chosen(choice, lambda process: not process.dead or process.ended is not None)
        if process is None:
            return
        report = process.report()
        if fate == "late":
            self.reports.append((process, report, self.now))
        elif fate != "lost":
            self.exchange(process, report, self.now, fate == "answered")

    def late_report(self, choice: int) -> None:
        if self.reports:
            self.exchange(*self.reports.pop(choice % len(self.reports)), True)

    def exchange(self, process: Process, report: Report, sent: float, answered: bool) -> None:
        answer = self.board.report(report, self.now)
        self.save()
        if answer.go_on and report.copy:
            self.accepted[report.unit] = report.copy.steps
        if answered:
            self.answer(process, report, sent, answer)

    def answer(self, process: Process, report: Report, sent: float, answer: Answer) -> None:
        if not answer.go_on or report.ended is not None:
            process.dead, process.forgotten = not answer.go_on or process.dead, True
            return
        process.sent = sent if process.sent is None else max(process.sent, sent)
        if process.copy == report.copy:
            process.copy = None
        process.asked |= set(answer.end)
        if answer.cancel and process.alive(self.now) and self.copied(process, final=True):
            process.ended = "stopped"

    # -- what devices do -----------------------------------------------------------------------------------------------

    def train(self, choice: int, steps: int, copies: bool) -> None:
        process = self.chosen(choice, lambda process: process.alive(self.now))
        if process:
            process.steps = {
                name: step if name in process.asked else min(step + steps, STEPS)
                for name, step in process.steps.items()
            }
            if copies:
                self.copied(process)
            over = all(step == STEPS or name in process.asked for name, step in process.steps.items())
            if over and self.copied(process, final=True):
                process.ended = "done"

    def copied(self, process: Process, *, final: bool = False) -> bool:
        """Copy into the shelf that the order names, or into its own if that is gone, unless it refuses the epoch."""
        order, own = process.order, process.device.partition("/")[0]
        there = {node.address for node in self.board.state.nodes}
        shelf = order.shelf.removeprefix("node-") or own
        at = (shelf if shelf in there else own, order.unit)
        if self.fences.get(at, 0) > order.epoch:
            process.dead = True
            return False
        digest = f"{order.unit}-{order.epoch}-{sum(process.steps.values())}-{final}"
        copy = Copy(order.unit, order.epoch, digest, dict(process.steps), 1, final, f"node-{at[0]}")
        process.copy = self.shelves[at] = self.known[digest] = copy
        self.fences[at] = order.epoch
        return True

    def end(self, choice: int, how: str) -> None:
        process = self.chosen(choice, lambda process: process.alive(self.now))
        if process:
            process.ended = how

    def kill_device(self, choice: int) -> None:
        process = self.chosen(choice, lambda process: True)
        if process:
            process.dead = process.forgotten = True

    # -- the cluster ---------------------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> None:
        self.cluster.now += seconds

    def fence(self) -> None:
        there = {node.address for node in self.board.state.nodes}
        for unit, epoch in self.board.to_fence():
            for host in there:
                self.fences[host, unit] = max(self.fences.get((host, unit), 0), epoch + 1)
            held = [copy for (host, name), copy in self.shelves.items() if name == unit and host in there]
            self.board.fenced(unit, epoch, held, self.now)
        self.save()

    def survey(self, gone: str) -> None:
        self.cluster.survey(*(name for name in "abc" if name not in gone))

    def restart(self, lost: bool, choice: int) -> None:
        """Kill the coordinator: also after it has taken a report, and before it could save or answer that."""
        process = self.chosen(choice, lambda process: not process.dead)
        if lost and process:
            self.board.report(process.report(), self.now)
        state = from_plain(State, json.loads(self.saved))
        self.cluster.board = Board(state, self.board.requests, node="node-a")
        self.board.restarted(self.now)
        self.written = -1
        self.save()
        self.cluster.survey("a", "b", "c")

    def cancel(self, choice: int) -> None:
        tasks = tasks_of(self.board.state, "r")
        self.board.cancel("r", tasks[choice % len(tasks)].name, self.now)
        self.save()

    def release(self) -> None:
        for name, found in self.board.state.devices.items():
            if found.quarantined:
                self.board.release(name, self.now)
        self.save()

    # -- what must hold ------------------------------------------------------------------------------------------------

    def no_task_is_trained_twice_at_once(self) -> None:
        alive = [name for process in self.processes if process.alive(self.now) for name in process.steps]
        assert len(alive) == len(set(alive)), alive

    def every_task_is_in_one_unit(self) -> None:
        state = self.board.state
        for one in state.tasks.values():
            units = [unit for unit in state.units.values() if one.name in unit.tasks and unit.phase != "done"]
            assert len(units) == (0 if one.over else 1), (one, state.units)
            assert one.name in state.units[one.unit].tasks

    def what_is_over_stays_so_and_has_its_results(self) -> None:
        state = self.board.state
        for name, how in self.ended.items():
            assert state.tasks[name].state == how
        for one in json.loads(self.saved or "{}").get("tasks", {}).values():
            if one["state"] in OVER:
                self.ended[f"{one['run']}/{one['name']}"] = one["state"]
        for one in state.tasks.values():
            copy = state.units[one.unit].copy
            if one.results:
                assert copy is not None
                assert copy.final or one.state in ("cancelled", "failed")
            if one.state == "finished":
                assert one.results
                assert copy
                assert copy.final
                assert copy.steps[one.name] == STEPS

    def act(self, rng: random.Random) -> None:
        """Something happens: mostly what always does, now and then a fault."""
        choice = rng.randrange(1 << 16)
        fates = ["answered"] * 12 + ["lost", "late", "late", "answer lost"]
        ends = ["failed", "killed", "killed", "no room", "no copy", "stopped"] + ["refused"] * (rng.random() < 0.1)
        acts: list[tuple[float, Callable[[], None]]] = [
            (30, lambda: self.beat(choice, rng.choice(fates))),
            (20, lambda: self.train(choice, rng.randint(1, 3), rng.random() < 0.3)),
            (12, lambda: self.wait(rng.choice([0.1, 1.0, 3.0, 10.0, 20.0, 29.0]))),
            (12, lambda: self.decide(rng.random() < 0.9)),
            (8, self.fence),
            (4, lambda: self.late_report(choice)),
            (4, lambda: self.late_order(choice, rng.random() < 0.5)),
            (3, lambda: self.survey(rng.choice(["", "", "", "b", "c", "bc"]))),
            (2, lambda: self.restart(rng.random() < 0.5, choice)),
            (1, lambda: self.end(choice, rng.choice(ends))),
            (0.5, lambda: self.kill_device(choice)),
            (0.5, lambda: self.wait(700.0)),
            (0.2, lambda: self.cancel(choice)),
            (3, self.release),
        ]
        rng.choices([do for _, do in acts], [weight for weight, _ in acts])[0]()
        self.check()

    def settle(self) -> None:
        """Without further faults all tasks come to an end."""
        self.release()
        self.survey("")
        self.processes = [process for process in self.processes if not process.dead]
        for turn in range(400):
            self.decide(True)
            self.fence()
            for process in list(self.processes):
                if not process.forgotten:
                    if process.alive(self.now):
                        self.train_one(process)
                    self.exchange(process, process.report(), self.now, True)
            self.check()
            if all(one.over for one in self.board.state.tasks.values()):
                break
            self.cluster.now += 1.0 if turn < 200 else 10.0
        assert all(one.over for one in self.board.state.tasks.values()), self.board.state.tasks
        assert self.board.idle

    def train_one(self, process: Process) -> None:
        number = [one for one in self.processes if not one.forgotten and one.alive(self.now)].index(process)
        self.train(number, 1, True)

    def check(self) -> None:
        self.no_task_is_trained_twice_at_once()
        self.every_task_is_in_one_unit()
        self.what_is_over_stays_so_and_has_its_results()


@settings(max_examples=25, deadline=None, database=None, phases=[Phase.generate])
@given(seed=st.integers(0, 1 << 32), joined=st.booleans(), count=st.integers(1, 6))
def test_no_task_is_lost_finished_twice_or_trained_twice_at_once(seed: int, joined: bool, count: int) -> None:
    chaos, rng = Chaos(), random.Random(seed)
    chaos.submit(joined, count)
    for _ in range(400):
        chaos.act(rng)
    chaos.settle()


def test_the_model_notices_a_lease_that_ends_too_early() -> None:
    assert _two_at_once(early=20.0)
    assert not _two_at_once(early=0.0)


def _two_at_once(early: float) -> bool:
    """Whether two processes train a task after 29 s of silence, if the board counts less than the devices do."""
    chaos = Chaos()
    chaos.board.lease -= early  # of which the devices know nothing
    chaos.submit(False, 1)
    chaos.decide(True)
    chaos.beat(0, "answered")
    chaos.cluster.now += 29.0
    for _ in range(2):
        chaos.decide(True)
        chaos.fence()
    for process in chaos.processes:
        process.order = replace(process.order, lease=30.0)
        if process.sent is None:
            chaos.exchange(process, process.report(), chaos.now, True)
    return sum(process.alive(chaos.now) for process in chaos.processes) > 1
