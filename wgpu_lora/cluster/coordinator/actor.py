"""The Ray actor of a cluster's coordinator."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from wgpu_lora.cluster.coordinator.asha import Asha
from wgpu_lora.cluster.coordinator.board import Board
from wgpu_lora.cluster.coordinator.caching import Caches
from wgpu_lora.cluster.coordinator.chores import Chores
from wgpu_lora.cluster.coordinator.journal import DIRECTORY, LOCK_SECONDS, Journal
from wgpu_lora.cluster.coordinator.measuring import Measuring
from wgpu_lora.cluster.coordinator.nodes import Away, Nodes
from wgpu_lora.cluster.coordinator.state import LEASE_SECONDS, MARGIN_SECONDS, Requests, State
from wgpu_lora.cluster.facts import Report, RunRequest, from_plain, to_plain
from wgpu_lora.cluster.node.layout import cluster_root
from wgpu_lora.errors import UserError, reason

LEASE = "WGPU_LORA_CLUSTER_LEASE"  # seconds, of the environment in which Ray was started on the head
TURN_SECONDS = 1.0  # at most, between decisions
FRESH_SECONDS = 10.0  # how old a survey may be that people are shown while nothing runs
SHOWN_SECONDS = 10.0  # how long they wait for a new one

Method = Callable[..., Awaitable[Any]]


def _answering(method: Method) -> Method:
    """A method that returns {"refused": sentence} where it would raise UserError, also while there is no journal."""

    @functools.wraps(method)
    async def answer(self: Coordinator, *arguments: Any) -> Any:
        try:
            self._begin()
            return await method(self, *arguments)
        except UserError as error:
            return {"refused": str(error)}

    return answer


class Coordinator:
    """One per cluster. All that it decides, and all that it is told, is done in one event loop, one after another."""

    def __init__(self, node: str):
        """Args: node: Ray's id of its own node."""
        self.node = node
        self._nodes = Nodes()
        self._written = 0
        self._wake = asyncio.Event()
        self._submitting = asyncio.Lock()
        self._start, self._monotonic = time.time(), time.monotonic()
        self._task: asyncio.Task[None] | None = None
        with suppress(UserError):  # who asks is told
            self._begin(LOCK_SECONDS)

    def _begin(self, patience: float = 0.0) -> None:
        """Take the journal and go on from it, unless that is done: a disk that is full may have room again.

        Raises:
            UserError: it cannot be read or written, or is another coordinator's.
        """
        if self._task:
            return
        self._journal = Journal(cluster_root() / DIRECTORY, patience)
        try:
            self.board = self._board()
        except UserError:
            self._journal.close()
            raise
        self._chores = Chores(self.board, self._nodes, self.now, self.save)
        self._caches = Caches(self.board, self._chores, self.now, self.save)
        self._measuring = Measuring(self.board, cluster_root() / DIRECTORY / "evaluations", self.now)
        self._task = asyncio.get_running_loop().create_task(self._run())

    def _board(self) -> Board:
        lease = _lease()
        said = ""
        state: State | None = None
        requests: Requests | None = None
        try:
            known = self._journal.read()
            state, requests = known if known else (None, None)
        except UserError as error:
            said = f"{error} It was kept as {self._journal.set_aside()}; runs that it knew are not continued."
        board = Board(
            state,
            requests,
            node=self.node,
            lease=lease,
            margin=MARGIN_SECONDS * min(lease / LEASE_SECONDS, 1.0),
            schedulers=Asha,
        )
        if state and state.events:  # the clock must not go back
            self._start = max(self._start, state.events[-1].time)
        if state:
            board.restarted(self.now())
        if said:
            board.state.say(self.now(), said)
        return board

    def now(self) -> float:
        """Seconds since 1970, by a clock that does not follow when the system's is set."""
        return self._start + time.monotonic() - self._monotonic

    def save(self) -> None:
        """Write the state, if something has changed that must not be forgotten. Raises UserError."""
        if self.board.changes == self._written:
            return
        changes = self.board.changes
        try:
            self._journal.write(self.board.state)
        except OSError as error:
            raise UserError(f"The coordinator's journal cannot be written ({reason(error)}): make room.") from None
        self._written = changes

    # -- for drivers ---------------------------------------------------------------------------------------------------

    @_answering
    async def submit(self, request: dict[str, Any]) -> dict[str, Any]:
        """Take a run, a RunRequest. Returns {"run": name}; the same request again changes nothing."""
        asked = _read(RunRequest, request)
        async with self._submitting:
            return await self._submit(asked)

    async def _submit(self, asked: RunRequest) -> dict[str, Any]:
        name = asked.name
        if self.board.requests.get(name) == asked:
            return {"run": name}
        if not self.board.state.nodes:
            await self._chores.survey()
        known, free = name in self.board.requests, name in self.board.forgettable(self.now())
        if free or not known:  # hosts may keep copies, and fences, of an earlier run of that name
            await self._chores.clear(name)
        if free:
            self.forget(name)
        self.board.submit(asked, self.now())
        try:
            self._journal.add(asked)
            self.save()
        except (OSError, UserError) as error:
            self.board.forget(name)
            raise UserError(f"The run cannot be written on the head ({reason(error)}): make room there.") from None
        self._chores.asked = 0.0  # hosts are the coordinator's to ask from now on
        self._wake.set()
        return {"run": name}

    def forget(self, run: str) -> None:
        """Forget a run that is over, and what was written of it here."""
        self.board.forget(run)
        self.save()
        self._journal.forget(run)
        self._measuring.forget(run)

    @_answering
    async def snapshot(self, run: str | None = None) -> dict[str, Any]:
        """A Snapshot of one run or of all."""
        if run is not None and run not in self.board.requests:
            raise UserError(f"No run '{run}' is known: 'wgpu-lora cluster status' lists all runs.")
        if self.board.idle and self.now() - self._chores.surveyed > FRESH_SECONDS:
            self._chores.spawn(self._chores.survey(), "survey")
            await self._chores.wait("survey", SHOWN_SECONDS)
        return to_plain(self.board.snapshot(run, self.now()))

    @_answering
    async def nodes(self) -> list[dict[str, Any]]:
        """The NodeFacts of all living nodes, as they say it now."""
        self._chores.asked = self.now()
        await self._chores.survey()
        return [to_plain(node) for node in self.board.state.nodes]

    @_answering
    async def cancel(self, run: str, task: str | None = None) -> dict[str, Any]:
        """End a task, or all of a run."""
        self.board.cancel(run, task, self.now())
        self.save()
        return {}

    @_answering
    async def release(self, device: str) -> dict[str, Any]:
        """Use a quarantined device again."""
        self.board.release(device, self.now())
        self.save()
        self._wake.set()
        return {}

    @_answering
    async def results(self, run: str) -> list[dict[str, Any]]:
        """Where the results are that are not fetched yet: task, unit, digest, host (a node's id) and files, each with
        path, digest and size. Those on a host that is away are left out."""
        return await self._chores.results(run)

    @_answering
    async def fetched(self, run: str, task: str) -> dict[str, Any]:
        """A driver has the results of a task, with the digests that were told."""
        self.board.fetched(run, task, self.now())
        self.save()
        return {}

    @_answering
    async def evaluations(self, run: str) -> list[dict[str, Any]]:
        """Held-out losses that another device has measured: task, step, eval_loss and time, in order."""
        return self._measuring.evaluations(run)

    @_answering
    async def retire(self) -> dict[str, Any]:
        """End the nodes' actors unless something runs. Returns {"running": how many units}."""
        running = len(list(self.board.state.placed()))
        if not running:
            await self._nodes.retire()
        return {"running": running}

    # -- for devices ---------------------------------------------------------------------------------------------------

    @_answering
    async def report(self, report: dict[str, Any]) -> dict[str, Any]:
        """A device's Report; returns the Answer."""
        told = _read(Report, report)
        answer = self.board.report(told, self.now())
        self._measuring.told(told)
        self.save()
        if told.ended is not None:
            self._wake.set()
        return to_plain(answer)

    # -- by itself -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                await self._turn()
            except Exception:  # the next turn may do better; Ray keeps what an actor prints
                traceback.print_exc(file=sys.stderr)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), TURN_SECONDS)
            self._wake.clear()

    async def _turn(self) -> None:
        await self._chores.begin(self._wake.set)
        self._caches.begin(self._wake.set)
        for name, order in self.board.decide(self.now()):
            device = self.board.state.devices[name]
            self._chores.spawn(self._deliver(device.node, device.facts.key, order), f"order {order.unit} {order.epoch}")
        self.save()
        for run in self._chores.outdated():
            self.forget(run)

    async def _deliver(self, node: str, key: str, order: Any) -> None:
        """Give an order to its device; should it arrive later, it is void."""
        self.save()  # its epoch must be known before it leaves
        try:
            await self._nodes.order(node, key, order)
        except (Away, UserError) as error:
            self.board.undelivered(order.unit, order.epoch, str(error), self.now())
            self.save()
            self._wake.set()


def _read(kind: Any, value: Any) -> Any:
    try:
        return from_plain(kind, value)
    except ValueError as error:
        raise UserError(f"A {kind.__name__} is not valid ({error}): use the same version on all machines.") from None


def _lease() -> float:
    try:
        return min(max(float(os.environ.get(LEASE, "")), 2.0), 3600.0)
    except ValueError:
        return LEASE_SECONDS
