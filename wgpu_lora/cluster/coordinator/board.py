"""What a coordinator decides: a state machine without a clock, Ray or files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from wgpu_lora.cluster.coordinator import fleet, runs, teaching, units
from wgpu_lora.cluster.coordinator.choosing import Queue, places, speeds_decide
from wgpu_lora.cluster.coordinator.ending import NO_ROOM_SECONDS, ended
from wgpu_lora.cluster.coordinator.orders import order
from wgpu_lora.cluster.coordinator.state import (
    LEASE_SECONDS,
    MARGIN_SECONDS,
    Requests,
    State,
    TaskState,
    UnitState,
)
from wgpu_lora.cluster.coordinator.sweeping import Schedulers, Sweeps
from wgpu_lora.cluster.coordinator.taught import plans_of
from wgpu_lora.cluster.coordinator.views import snapshot
from wgpu_lora.cluster.facts import (
    Answer,
    Copy,
    NodeFacts,
    Order,
    Progress,
    Report,
    RunRequest,
    Snapshot,
)
from wgpu_lora.cluster.placement.place import place

COPY_SECONDS = 600.0  # how long a unit waits for the host that has its newest copy
ANSWER_SECONDS = 60.0  # that a device's actor may take to start; until its first answer it trains nothing


class Board:
    """Runs, tasks and devices of a cluster, and what happens to them.

    `now` is in seconds, of a clock that never goes back; people are shown it as the time since 1970.

    A unit is placed again only when no process of its earlier epochs can run: its process has said that it ended, or
    its lease is over. A device starts a process after its first report of the epoch was answered, and ends it `lease`
    seconds after it SENT the last report that was answered. The board counts lease and margin from its ANSWER, which is
    later. So a device that was never answered has no process, and one that was answered has none when the time is over.
    Answers are not in the journal, but none is later than a restart, when all leases begin anew.

    Attributes:
        changes: grows with whatever must be in the journal before an order or an answer leaves.
    """

    def __init__(
        self,
        state: State | None = None,
        requests: Requests | None = None,
        *,
        node: str = "",
        lease: float = LEASE_SECONDS,
        margin: float = MARGIN_SECONDS,
        schedulers: Schedulers | None = None,
    ):
        """Args: node: Ray's id of the coordinator's node, whose host keeps the copies. schedulers: of sweeps."""
        self.state = state or State()
        self.requests: Requests = requests if requests is not None else {}
        self.node, self.lease, self.margin = node, lease, margin
        self.changes = 0
        self._sweeps, self._queue = Sweeps(schedulers), Queue()

    def restarted(self, now: float) -> None:
        """Go on with a state from the journal."""
        for unit in self.state.placed():
            unit.answered, unit.expires = True, self._expiry(unit, now)
        for device in self.state.devices.values():
            device.gone = True  # until a survey finds it
        self.state.nodes = []
        self.changes += 1

    # -- runs ----------------------------------------------------------------------------------------------------------

    def submit(self, request: RunRequest, now: float) -> None:
        """Take a run. Raises UserError: see `runs.check`, and a sweep's scheduler may refuse it."""
        runs.check(self.state, self.requests, request)
        self._sweeps.check(request)
        runs.add(self.state, self.requests, request, now)
        self.changes += 1

    def cancel(self, run: str, task: str | None, now: float) -> None:
        """End a task, or all of a run, with its last checkpoint. Raises UserError if there is no such run or task."""
        runs.cancel(self.state, run, task, now)
        self.settle(run, now)

    def fetched(self, run: str, task: str, now: float) -> None:
        """The results of a task are where they belong."""
        found = self.state.tasks.get(f"{run}/{task}")
        if found and found.over and not found.fetched:
            found.fetched = True
            self.settle(run, now)

    def forget(self, run: str) -> None:
        """Forget a run that is over."""
        runs.forget(self.state, self.requests, run)
        self._sweeps.forget(run)
        self.changes += 1

    def forgettable(self, now: float) -> list[str]:
        """Runs that nobody needs any more."""
        return runs.forgettable(self.state, now)

    # -- devices -------------------------------------------------------------------------------------------------------

    def surveyed(self, nodes: Sequence[NodeFacts], now: float) -> None:
        """Take what all living nodes say of themselves; devices that are not among them are gone."""
        before = {name: device.gone for name, device in self.state.devices.items()}
        fleet.survey(self.state, nodes, now)
        self.changes += before != {name: device.gone for name, device in self.state.devices.items()}

    def unmeasured(self, now: float) -> list[tuple[str, str]]:
        """Idle devices that are to be measured before anything is placed on them: their nodes and keys. They are busy
        until they are `measured`, for a bounded time."""
        return fleet.to_measure(self.state, now) if speeds_decide(self.state, self.requests) else []

    def measured(self, device: str, speed: float | None = None, joined_speedup: float | None = None) -> None:
        """A device has been measured, or cannot be."""
        if found := self.state.devices.get(device):
            found.measuring = 0.0
            if speed is not None:
                found.speed, found.joined_speedup = speed, joined_speedup
                found.facts = replace(found.facts, speed=speed, joined_speedup=joined_speedup)

    def release(self, device: str, now: float) -> None:
        """Use a quarantined device again. Raises UserError if it is not quarantined."""
        fleet.release_device(self.state, device, now)
        self.changes += 1

    # -- units ---------------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> list[tuple[str, Order]]:
        """End the leases that are over, and place what waits.

        Returns:
            Orders, each with the id of its device. They may leave only when the state is in the journal.
        """
        self._expire(now)
        self.changes += teaching.review(self.state, self.requests, now)
        given = []
        for jobs in sorted({request.jobs_per_device for request in self.requests.values()}):
            devices = places(self.state, jobs, now)
            if all(device.out or device.active >= jobs for device in devices):
                continue
            all_waiting = self._queue.waiting(self.state, self.requests, now)
            tasks = [one for one in all_waiting if self.requests[one.run].jobs_per_device == jobs]
            for placement in place(tasks, devices, now) if tasks else ():
                unit = self._unit_of(placement.tasks)
                unit.lease = self.lease
                expires = now + max(self.lease, ANSWER_SECONDS) + self.margin
                units.start(self.state, unit, placement.devices, placement.needed, expires)
                again = " again" if unit.epoch > 1 else ""
                self.state.say(now, f"{units.called(unit)} starts{again} on {self.state.called(placement.devices[0])}")
                made = order(self.state, self.requests[unit.run], unit, self.node)
                given.append((placement.devices[0], made))
                self.changes += 1
        return given

    def _unit_of(self, ids: Sequence[str]) -> UnitState:
        """The unit of tasks that were placed together, which is new if placement joined them."""
        tasks = [self.state.tasks[name] for name in ids]
        unit = self.state.units[tasks[0].unit]
        if set(unit.tasks) == {task.name for task in tasks}:
            return unit
        return units.join(self.state, tasks)

    def _expiry(self, unit: UnitState, now: float) -> float:
        return now + unit.lease + self.margin

    def _expire(self, now: float) -> None:
        for unit in [unit for unit in self.state.placed() if now > unit.expires]:
            device = self.state.called(unit.devices[0])
            seconds = unit.lease if unit.answered else max(unit.lease, ANSWER_SECONDS)
            if not unit.answered:
                unit.avoid[unit.devices[0]] = now + NO_ROOM_SECONDS
            self._lost(unit, now, f"nothing was heard of {device} for {seconds + self.margin:.0f} s")
        for unit in [unit for unit in self.state.units.values() if unit.phase == "waiting" and unit.copy]:
            if self.state.node_at(unit.at) is not None:
                unit.sought = False
            elif not unit.sought:  # another shelf may have the same
                unit.sought, unit.phase = True, "lost"
            elif now - min(task.since for task in self.state.members(unit)) > COPY_SECONDS:
                self._without_copy(unit, now, f"the host {unit.at}, which has its newest checkpoint, is gone")

    def _without_copy(self, unit: UnitState, now: float, why: str) -> None:
        """Go on from an older copy, if a shelf that can be reached has one, or begin anew. No process runs."""
        self.state.say(now, f"{units.called(unit)} cannot go on from its newest checkpoint: {why}")
        unit.copy, unit.phase = None, "lost"
        for task in self.state.members(unit):
            task.kept, task.said = Progress(), why
        self.changes += 1

    def undelivered(self, unit: str, epoch: int, why: str, now: float) -> None:
        """An order could not be given to its device. Should it arrive nevertheless, its first report is refused."""
        found = self.state.units.get(unit)
        if found and found.phase == "placed" and found.epoch == epoch and not found.answered:
            found.avoid[found.devices[0]] = now + NO_ROOM_SECONDS
            self._lost(found, now, why)

    def _lost(self, unit: UnitState, now: float, why: str) -> None:
        units.lose(self.state, unit, now, why)
        self.settle(unit.run, now)

    def to_fence(self) -> list[tuple[str, int]]:
        """Units that were lost, with the epochs up to which shelves must refuse copies before they are placed again."""
        return [(unit.id, unit.epoch) for unit in self.state.units.values() if unit.phase == "lost"]

    def fenced(self, unit: str, epoch: int, held: Sequence[Copy], now: float) -> None:
        """All shelves that can be reached refuse copies up to this epoch, and hold these, one of which may be newer."""
        found = self.state.units.get(unit)
        if found is None or found.phase != "lost" or found.epoch != epoch:
            return
        sound = [copy for copy in held if copy.digest not in found.unreadable]
        for copy in sorted(sound, key=lambda copy: (copy.epoch, sum(copy.steps.values()), copy.final)):
            units.take_copy(self.state, found, copy)
        units.wait(self.state, found, now, "its device was lost")
        self.settle(found.run, now)

    def report(self, report: Report, now: float) -> Answer:
        """Take a device's report. The answer may leave only when the state is in the journal, if `changes` grew."""
        unit = self.state.units.get(report.unit)
        if unit is None or unit.phase != "placed" or report.epoch != unit.epoch:
            return Answer(go_on=False)
        unit.answered, unit.expires = True, self._expiry(unit, now)
        tasks = self.state.members(unit)
        for task in tasks:
            self._progress(task, unit, report)
        if report.copy and report.copy.epoch == unit.epoch:
            self.changes += units.take_copy(self.state, unit, report.copy)
        if report.ended == "no copy":
            units.release(self.state, unit)
            unit.unreadable += [unit.copy.digest] if unit.copy else []
            self._without_copy(unit, now, report.said)
            return Answer()
        if report.ended is not None:
            ended(self.state, unit, report, now)
            self.settle(unit.run, now)
            return Answer()
        if all(task.ending == "cancelled" for task in tasks):
            return Answer(cancel=True)
        return Answer(end=[task.name for task in tasks if task.ending and not task.outcome])

    def _progress(self, task: TaskState, unit: UnitState, report: Report) -> None:
        told = report.progress.get(task.name)
        if told is not None:
            task.progress = _merged(task.progress, told)
            if told.step and task.state != "running":
                task.state = "running"
                plan = next(iter(plans_of(self.state, self.requests[task.run], task.name).values()))
                fleet.remember(self.state, unit.devices[0], plan.base, plan.data)
            self.changes += self._sweeps.ask(self.state, self.requests, task, told.step)
        if (outcome := report.outcomes.get(task.name)) and outcome != task.outcome:
            task.outcome = outcome
            self.changes += 1
        task.said = report.said

    def heldout(self, run: str, task: str, step: int, loss: float) -> None:
        """Take a held-out loss that another device has measured."""
        found = self.state.tasks.get(f"{run}/{task}")
        if found:
            found.progress = _merged(found.progress, replace(found.progress, eval_loss=loss, best_eval_loss=loss))
            found.kept = _merged(found.kept, replace(found.kept, eval_loss=loss, best_eval_loss=loss))
            self._sweeps.ask(self.state, self.requests, found, step)
            self.changes += 1

    # -- all of it -----------------------------------------------------------------------------------------------------

    def snapshot(self, run: str | None, now: float) -> Snapshot:
        """What people see, of one run or of all."""
        return snapshot(self.state, self.requests, run, now)

    @property
    def idle(self) -> bool:
        """Whether all runs are over."""
        return all(run.ended for run in self.state.runs.values())

    def settle(self, run: str, now: float) -> None:
        """Note when a run is over; called after whatever may have ended it."""
        runs.settle(self.state, self.requests, run, now)
        self.changes += 1


def _merged(before: Progress, told: Progress) -> Progress:
    """Newer values; held-out losses stay until there are newer ones, which a resumed process measures later."""
    losses = [loss for loss in (before.best_eval_loss, told.best_eval_loss) if loss is not None]
    return replace(
        told,
        loss=told.loss if told.loss is not None else before.loss,
        eval_loss=told.eval_loss if told.eval_loss is not None else before.eval_loss,
        best_eval_loss=min(losses, default=None),
    )
