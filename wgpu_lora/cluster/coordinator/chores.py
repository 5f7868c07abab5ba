"""What a coordinator does beside its decisions, and what waits for nodes: surveys, fences, results."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

from wgpu_lora.cluster.coordinator import teaching
from wgpu_lora.cluster.coordinator.board import Board
from wgpu_lora.cluster.coordinator.nodes import Away, Nodes
from wgpu_lora.cluster.coordinator.state import TaskState
from wgpu_lora.cluster.devices.versions import difference, own_versions
from wgpu_lora.cluster.facts import Copy, NodeFacts, from_plain
from wgpu_lora.errors import UserError

SURVEY_SECONDS = 10.0
MISSES = 3  # surveys in a row that a node may miss while Ray takes it for alive
PUBLISH_SECONDS = 600.0  # that writing a result to the shared folder may take
RETRY_SECONDS = 15.0
MEASURE_SECONDS = 300.0
IDLE_SECONDS = 60.0  # without anything to do, after which nodes' actors are ended
ASKED_SECONDS = 1800.0  # more, after a driver has asked for what it does with hosts: plans, sent data, results
KEEP_SECONDS = 86400.0  # how long runs are shown that are over


class Chores:
    """Each kind of work for each unit, task or node is done once at a time, beside the others.

    Attributes:
        surveyed: when the newest survey ended.
    """

    def __init__(self, board: Board, nodes: Nodes, now: Callable[[], float], save: Callable[[], None]):
        self.board, self.surveyed = board, 0.0
        self._nodes, self._now, self._save = nodes, now, save
        self._going: dict[str, asyncio.Task[None]] = {}
        self._not_before: dict[str, float] = {}
        self._missed: dict[str, int] = {}
        self._other: dict[str, str | None] = {}  # what is another version on a node
        self._living: set[str] = set()
        self._surveying: asyncio.Lock = asyncio.Lock()
        self._idle_since: float | None = None
        self.asked = 0.0  # when a driver last asked for nodes or results, whose hosts it then calls itself
        self._cleared: set[str] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Do something beside, unless it is being done."""
        if name in self._going:
            work.close()
            return

        async def guarded() -> None:
            try:
                await work
            except Exception:  # Ray keeps what an actor prints
                traceback.print_exc(file=sys.stderr)
            finally:
                del self._going[name]

        self._going[name] = asyncio.get_running_loop().create_task(guarded())

    async def wait(self, name: str, seconds: float) -> None:
        """Wait for something that is done beside, but not longer than that."""
        if name in self._going:
            await asyncio.wait({self._going[name]}, timeout=seconds)

    async def begin(self, wake: Callable[[], None]) -> None:
        """Begin whatever is due."""
        if self.board.idle:
            await self._rest()
            return
        self._idle_since = None
        living = set(await self._nodes.living())
        if living != self._living or self._now() - self.surveyed > SURVEY_SECONDS:
            self._living = living
            self.spawn(self._then(wake, self.survey), "survey")
        for unit, epoch in self.board.to_fence():
            self.spawn(self._then(wake, self._fence, unit, epoch), f"fence {unit}")
        for node, key in self.board.unmeasured(self._now()):
            self.spawn(self._then(wake, self._measure, node, key), f"measure {node} {key}")
        for task in [task for task in self.board.state.tasks.values() if task.results and not task.fetched]:
            name = f"publish {task.id}"
            if self.board.requests[task.run].shared and self._now() >= self._not_before.get(name, 0.0):
                self.spawn(self._publish(task, name), name)

    @staticmethod
    async def _then(wake: Callable[[], None], work: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        await work(*arguments)
        wake()

    async def _rest(self) -> None:
        """After a while without anything to do, end the nodes' actors."""
        if self._idle_since is None:
            self._idle_since = self._now()
        if self._now() - max(self._idle_since, self.surveyed, self.asked + ASKED_SECONDS) > IDLE_SECONDS:
            await self._nodes.retire()

    # -- nodes ---------------------------------------------------------------------------------------------------------

    async def survey(self) -> None:
        """Ask all nodes what they are. One that is alive but busy keeps what it said before for a while."""
        async with self._surveying:
            living = await self._nodes.living()
            before = {node.id: node for node in self.board.state.nodes}
            found = await asyncio.gather(*(self._survey(node, before.get(node)) for node in living))
            self.surveyed = self._now()
            self.board.surveyed([node for node in found if node is not None], self._now())
            self._save()

    async def _survey(self, node: str, before: NodeFacts | None) -> NodeFacts | None:
        try:
            told: NodeFacts = from_plain(NodeFacts, await self._nodes.ask(node, "survey"))
        except (Away, UserError, ValueError) as error:
            self._missed[node] = self._missed.get(node, 0) + 1
            if self._missed[node] == 1:
                self.board.state.say(self._now(), f"Node {node:.8} does not say what devices it has: {error}")
            return before if self._missed[node] < MISSES else None
        self._missed.pop(node, None)
        return self._same_version(told)

    def _same_version(self, told: NodeFacts) -> NodeFacts:
        """A node as it is, or without devices: another version would not train as the others do."""
        what = difference(own_versions(), told.versions)
        if what and self._other.get(told.id) != what:
            self.board.state.say(self._now(), f"No device of {told.host} is used, since {what}: install the head's.")
        self._other[told.id] = what
        return replace(told, devices=[]) if what else told

    async def _measure(self, node: str, key: str) -> None:
        """Measure a device's speed, which its host keeps if nothing else ran on it meanwhile."""
        device = f"{self.board.state.address(node)}/{key}"
        speed = joined = None
        try:
            told = await self._nodes.ask(node, "measure", key, seconds=MEASURE_SECONDS)
            speed, joined = float(told["tokens_per_second"]), float(told["joined_speedup"])
        except (Away, UserError) as error:
            self.board.state.say(self._now(), f"The speed of {self.board.state.called(device)} is not known: {error}")
        self.board.measured(device, speed, joined)

    async def _fence(self, unit: str, epoch: int) -> None:
        """Have all shelves refuse copies of this epoch, and take the newest that they hold."""
        if not set(await self._nodes.living()) <= {node.id for node in self.board.state.nodes}:
            await self.survey()  # a node that has started again has another id, which must be known with its address
        self.board.fenced(unit, epoch, await self._fence_all(unit, epoch), self._now())
        self._save()

    async def _fence_all(self, unit: str, epoch: int) -> list[Copy]:
        """The coordinator's own host, which has most copies, must answer; others may be gone."""
        while True:
            living = await self._nodes.living()
            told = await asyncio.gather(*(self._fence_one(node, unit, epoch) for node in living))
            if any(node == self.board.node and answered for node, (answered, _) in zip(living, told, strict=True)):
                return [copy for _, copy in told if copy is not None]
            await asyncio.sleep(1.0)

    async def _fence_one(self, node: str, unit: str, epoch: int) -> tuple[bool, Copy | None]:
        try:
            await self._nodes.ask(node, "fence", unit, epoch + 1)
            held = await self._nodes.ask(node, "held", unit)
            return True, from_plain(Copy, held | {"host": node}) if held else None
        except (Away, UserError, ValueError):
            return False, None

    # -- results -------------------------------------------------------------------------------------------------------

    async def _where(self, task: TaskState) -> tuple[str, str] | None:
        """The node and the digest of the copy that has a task's results, if a living node has it.

        A host's address may have changed since, and others may have the copy, too."""
        unit = self.board.state.units[task.unit]
        if not unit.copy:
            return None
        node = self.board.state.node_at(unit.at) or await self._holder(unit.id, unit.copy.digest)
        return (node, unit.copy.digest) if node else None

    async def _holder(self, unit: str, digest: str) -> str | None:
        """A living node that has this copy of a unit."""
        for node in await self._nodes.living():
            with suppress(Away, UserError):
                held = await self._nodes.ask(node, "held", unit)
                if held and held.get("digest") == digest:
                    return node
        return None

    async def results(self, run: str) -> list[dict[str, Any]]:
        """See `Coordinator.results`. Raises UserError if there is no such run."""
        if run not in self.board.requests:
            raise UserError(f"No run '{run}' is known: 'wgpu-lora cluster status' lists all runs.")
        self.asked = self._now()
        tasks = [task for task in self.board.state.tasks.values() if task.run == run]
        found = []
        for task in [task for task in tasks if task.over and task.results and not task.fetched]:
            where = await self._where(task)
            if where is None:
                task.said = f"its results are on {self.board.state.units[task.unit].at}, which is away"
            else:
                node, digest = where
                try:
                    files = await self._nodes.ask(node, "results", task.unit, digest, task.name)
                except (Away, UserError) as error:
                    task.said = f"its results cannot be read: {error}"
                    continue
                found.append({"task": task.name, "unit": task.unit, "digest": digest, "host": node, "files": files})
        return found

    async def _publish(self, task: TaskState, name: str) -> None:
        """Write a task's results to the shared folder, from the host that has them."""
        self._not_before[name] = self._now() + RETRY_SECONDS
        where = await self._where(task)
        request = self.board.requests[task.run]
        output = next(one.output for one in request.tasks if one.name == task.name)
        try:
            if where is None:
                raise Away(f"the host {self.board.state.units[task.unit].at}, which has them, is gone")
            node, digest = where
            place = task.name, output, request.shared
            await self._nodes.ask(node, "publish", task.unit, digest, *place, seconds=PUBLISH_SECONDS)
        except (Away, UserError) as error:
            task.said = f"its results are not in {output} yet: {error}"
            return
        task.said = "" if task.state == "finished" else task.said
        self._not_before.pop(name, None)
        self.board.fetched(task.run, task.name, self._now())
        self._save()

    # -- runs that are over --------------------------------------------------------------------------------------------

    def outdated(self) -> list[str]:
        """Have hosts remove what they keep of runs that nobody needs; returns those that were over a day ago."""
        forgettable = self.board.forgettable(self._now())
        for run in forgettable:
            if run not in self._cleared:
                self._cleared.add(run)
                self.spawn(self.clear(run), f"clear {run}")
        self._cleared.intersection_update(forgettable)
        return [run for run in forgettable if self._now() - self.board.state.runs[run].ended > KEEP_SECONDS]

    async def clear(self, run: str) -> None:
        """Have all hosts remove what they keep of a run."""
        parcels = teaching.only_of(self.board.state, run)
        await asyncio.gather(*(self._clear(node, run, parcels) for node in await self._nodes.living()))

    async def _clear(self, node: str, run: str, parcels: list[str]) -> None:
        try:
            await self._nodes.ask(node, "forget", run, parcels)
        except (Away, UserError) as error:
            self.board.state.say(self._now(), f"Node {node:.8} may still keep copies of {run}: {error}")
