"""The teacher caches of a board: which are to be made, and what is told of them. Without a clock or Ray."""

from __future__ import annotations

from dataclasses import dataclass

from wgpu_lora.cluster.coordinator import teaching
from wgpu_lora.cluster.coordinator.board import Board
from wgpu_lora.cluster.coordinator.state import CacheState
from wgpu_lora.cluster.facts import CacheStanding


@dataclass(frozen=True)
class BoardCaches:
    """The caches of all runs of a board."""

    board: Board

    def due(self, now: float) -> list[CacheState]:
        """Caches that their device is to make, or to be asked about; those that are not `making` yet begin."""
        found = teaching.due(self.board.state, self.board.requests, now)
        self.board.changes += sum(map(teaching.began, found))
        return found

    def unwanted(self) -> list[CacheState]:
        """Caches that are being made though nothing waits for them any more; they are not made from now on."""
        state, requests = self.board.state, self.board.requests
        making = [cache for cache in state.caches.values() if cache.phase == "making"]
        found = [cache for cache in making if not teaching.wanted(state, requests, cache)]
        for cache in found:
            cache.phase = "waiting"
        self.board.changes += len(found)
        return found

    def told(self, cache: CacheState, standing: CacheStanding, now: float) -> None:
        """Take what a device says about caches; `ended` is `away` if it does not answer."""
        state, requests = self.board.state, self.board.requests
        if state.caches.get(cache.id) is cache and teaching.told(state, requests, cache, standing, now):
            self.board.settle(cache.run, now)
