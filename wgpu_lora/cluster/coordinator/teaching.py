"""Teacher caches from the first try to the last: when they are made, and what follows if they cannot be."""

from __future__ import annotations

from collections.abc import Iterator

from wgpu_lora.cluster.coordinator import units
from wgpu_lora.cluster.coordinator.choosing import Refusals
from wgpu_lora.cluster.coordinator.state import CacheState, Requests, State, UnitState
from wgpu_lora.cluster.coordinator.taught import cache_of, digests_of
from wgpu_lora.cluster.facts import CacheStanding, Progress, RunRequest

FAILURES, MISSES = 3, 6  # in a row, after which there will be no caches
RETRY_SECONDS = 15.0  # before the second try; twice as long before each later one
DOUBLINGS = 5


def add(state: State, request: RunRequest) -> None:
    """Take the caches of a new run."""
    for taught in request.taught.values():
        cache = CacheState(request.name, taught.caches)
        state.caches.setdefault(cache.id, cache)


def users(state: State, requests: Requests, cache: CacheState) -> Iterator[UnitState]:
    """Units that are, or will be, trained with caches, and have not ended."""
    request = requests[cache.run]
    for unit in state.units.values():
        mine = unit.run == cache.run and unit.phase in ("waiting", "placed", "lost")
        if mine and any(cache_of(state, request, name) is cache for name in unit.tasks):
            yield unit


def review(state: State, requests: Requests, now: float) -> bool:
    """Have caches made again that no host has any more, and of which units wait; returns whether there are any."""
    changed = False
    for cache in state.caches.values():
        if cache.phase != "ready" or not state.nodes or any(map(state.node_at, cache.at)):
            continue
        if any(unit.phase == "waiting" for unit in users(state, requests, cache)):
            state.say(now, f"{cache.run}: a teacher cache is made again, since the hosts that had it are gone")
            cache.phase, cache.parcels, cache.at, cache.rows = "waiting", {}, [], 0
            changed = True
    return changed


def due(state: State, requests: Requests, now: float) -> list[CacheState]:
    """Caches that are to be made, or asked after, now."""
    return [
        cache
        for cache in state.caches.values()
        if (cache.phase == "making" or (cache.phase == "waiting" and now >= cache.not_before))
        and wanted(state, requests, cache)
    ]


def wanted(state: State, requests: Requests, cache: CacheState) -> bool:
    """Whether anything waits for caches."""
    return any(unit.phase == "waiting" for unit in users(state, requests, cache))


def began(cache: CacheState) -> bool:
    """The next try; returns whether it is a new one."""
    if cache.phase == "making":
        return False
    cache.phase, cache.said = "making", ""
    cache.attempt += 1
    return True


def told(state: State, requests: Requests, cache: CacheState, standing: CacheStanding, now: float) -> bool:
    """Take what the device says about caches that are being made; returns whether something must be kept."""
    if cache.phase != "making":
        return False
    if standing.rows > cache.rows:
        cache.failures = cache.misses = 0
    cache.rows, cache.total = max(standing.rows, cache.rows), standing.total or cache.total
    if standing.parcels:
        cache.phase, cache.parcels, cache.said = "ready", dict(standing.parcels), ""
        cache.at = [address for node in standing.hosts if (address := state.address(node))]
        cache.failures = cache.misses = 0
        state.say(now, f"{cache.run}: a teacher cache of {cache.total:,} rows is complete")
        return True
    if standing.ended is not None:
        failed(state, requests, cache, standing.ended, standing.said, now)
        return True
    return False


def failed(state: State, requests: Requests, cache: CacheState, ended: str, said: str, now: float) -> None:
    """A try was in vain: later again or, after some, its tasks go on without."""
    cache.phase, cache.said = "waiting", said
    if ended in ("failed", "refused"):
        cache.failures += 1
    else:
        cache.misses += 1
    tries = max(cache.failures, cache.misses)
    again = ended != "refused" and cache.failures < FAILURES and cache.misses < MISSES
    # Units that train with caches made earlier could not go on with a live teacher.
    if again or any(unit.phase != "waiting" for unit in users(state, requests, cache)):
        cache.not_before = now + RETRY_SECONDS * 2 ** min(tries - 1, DOUBLINGS)
        state.say(now, f"{cache.run}: a teacher cache is tried again: {said}")
        return
    _without(state, requests, cache, said, now)


def _without(state: State, requests: Requests, cache: CacheState, said: str, now: float) -> None:
    """No caches: the units that waited get live teachers, if that fits on a device, and fail if not."""
    request = requests[cache.run]
    without = list(users(state, requests, cache))
    cache.phase = "failed"
    for unit in without:
        why = _unfit(state, request, unit)
        if why is None:
            unit.copy = None  # of training with a cache, which a live teacher cannot continue
            state.say(now, f"{units.called(unit)} has its teacher beside it, since there is no teacher cache: {said}")
            for task in state.members(unit):
                task.progress, task.kept = Progress(), Progress()
            if len(unit.tasks) > 1:
                units.split(state, unit)
        else:
            about = f"There is no teacher cache ({said.rstrip('.')}), and with its teacher beside it: {why}"
            units.give_up(state, unit, about)


def _unfit(state: State, request: RunRequest, unit: UnitState) -> str | None:
    lacking = next((name for name in unit.tasks if name in request.taught and not request.taught[name].live), None)
    if lacking is not None:
        return f"{lacking} cannot be planned on any device."
    return Refusals(state, request).of(unit.tasks)


def forget(state: State, run: str) -> None:
    """Forget the caches of a run."""
    for name in [cache.id for cache in state.caches.values() if cache.run == run]:
        del state.caches[name]


def only_of(state: State, run: str) -> list[str]:
    """The digests of parcels that only the caches of this run are."""
    mine = [digest for cache in state.caches.values() if cache.run == run for digest in digests_of(cache)]
    others = {digest for cache in state.caches.values() if cache.run != run for digest in digests_of(cache)}
    return [digest for digest in dict.fromkeys(mine) if digest not in others]
