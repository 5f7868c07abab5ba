"""The coordinator's way to the actors that make teacher caches. Imports Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
import ray.exceptions

from wgpu_lora.cluster.coordinator.board import Board
from wgpu_lora.cluster.coordinator.caches import BoardCaches
from wgpu_lora.cluster.coordinator.chores import Chores
from wgpu_lora.cluster.coordinator.orders import shelf
from wgpu_lora.cluster.coordinator.state import CacheState
from wgpu_lora.cluster.facts import CacheStanding, RunRequest, from_plain
from wgpu_lora.cluster.node.caching_actor import caching_device
from wgpu_lora.cluster.node.plainly import accepted
from wgpu_lora.errors import UserError

CALL_SECONDS = 60.0
GONE = (ray.exceptions.RayError, LookupError, ConnectionError, TimeoutError, asyncio.TimeoutError, ValueError)


class Caches:
    """Has the caches of all runs made, each by its evaluation device, and asks how far they are."""

    def __init__(self, board: Board, chores: Chores, now: Callable[[], float], save: Callable[[], None]):
        self._board, self._chores, self._now, self._save = board, chores, now, save
        self._caches = BoardCaches(board)
        self._handles: dict[str, Any] = {}

    def begin(self, wake: Callable[[], None]) -> None:
        """Begin whatever is due; called every second or so."""
        for cache in self._caches.unwanted():
            self._chores.spawn(self._stop(cache), f"stop cache {cache.id}")
        if not self._board.state.nodes:
            return  # the coordinator has just started
        due = self._caches.due(self._now())
        for cache in due:
            self._chores.spawn(self._ask(cache, wake), f"cache {cache.id}")
        busy = {self._request(cache).eval_device for cache in due}
        for device in self._handles.keys() - busy:
            self._chores.spawn(self._rest(device), f"rest {device}")

    def _request(self, cache: CacheState) -> RunRequest:
        return self._board.requests[cache.run]

    async def _ask(self, cache: CacheState, wake: Callable[[], None]) -> None:
        """Ask how far caches are, which begins them."""
        request, state = self._request(cache), self._board.state
        device = request.eval_device or ""
        names = [name for name, taught in request.taught.items() if taught.caches == cache.name]
        options = next(task.options for task in request.tasks if task.name in names)
        known = state.devices.get(device)
        if known is None or known.gone:
            standing = CacheStanding(ended="away", said=f"{state.called(device)} is gone")
        else:
            keeper = shelf(state, device, self._board.node)
            asked = cache.run, cache.name, options, cache.attempt, keeper
            try:
                standing = from_plain(CacheStanding, await self._call(device, "make", *asked))
            except UserError as error:
                standing = CacheStanding(ended="refused", said=str(error))
            except GONE as error:
                self._handles.pop(device, None)
                said = f"{state.called(device)} does not answer ({type(error).__name__})"
                standing = CacheStanding(ended="away", said=said)
        self._caches.told(cache, standing, self._now())
        self._save()
        if standing.parcels or standing.ended:
            wake()

    async def _call(self, device: str, method: str, *arguments: Any) -> Any:
        known = self._board.state.devices[device]
        if device not in self._handles:
            place = known.node, known.facts.address, known.facts.key
            self._handles[device] = await asyncio.to_thread(caching_device, *place)
        answer = getattr(self._handles[device], method).remote(*arguments)
        return accepted(await asyncio.wait_for(asyncio.wrap_future(answer.future()), CALL_SECONDS))

    async def _stop(self, cache: CacheState) -> None:
        with suppress(UserError, KeyError, *GONE):
            await self._call(self._request(cache).eval_device or "", "stop", cache.run, cache.name)

    async def _rest(self, device: str) -> None:
        """End an actor that has nothing to do."""
        handle = self._handles.pop(device, None)
        if handle is not None:
            with suppress(*GONE):
                await asyncio.to_thread(ray.kill, handle)
