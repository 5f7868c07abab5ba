"""Tasks with a teacher that is cached: what they are planned and trained with, and whether they can start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from wgpu_lora.cluster.coordinator.state import CacheState, State, UnitState
from wgpu_lora.cluster.facts import Progress, RunRequest, RunRequirements, Task
from wgpu_lora.cluster.spec.paths import sent_name

LIVE = ("teacher", "teacher_adapter", "teacher_base_dtype", "teacher_top_k")  # options that a cache replaces


def cache_of(state: State, request: RunRequest, name: str) -> CacheState | None:
    """The caches that a task is to be trained with; None if it has no teacher, or a live one."""
    found = _caches(state, request, name)
    return found if found and found.phase != "failed" else None


def _caches(state: State, request: RunRequest, name: str) -> CacheState | None:
    taught = request.taught.get(name)
    return state.caches.get(f"{request.name}/{taught.caches}") if taught else None


def plans_of(state: State, request: RunRequest, name: str) -> dict[str, RunRequirements]:
    """The plans of a task by plan class, as it will run."""
    found = _caches(state, request, name)
    if found and found.phase == "failed":
        return request.taught[name].live
    return request.plans[name]


def as_trained(state: State, request: RunRequest, task: Task) -> Task:
    """A task with its caches, which are ready, instead of its teacher."""
    cache = cache_of(state, request, task.name)
    if cache is None or not cache.parcels:
        return task
    kept = {name: value for name, value in task.options.items() if name not in LIVE}
    return replace(task, options={**kept, **cache.parcels})


def awaited(state: State, request: RunRequest, unit: UnitState) -> CacheState | None:
    """The caches that a unit cannot start without, and that are not ready."""
    found = (cache_of(state, request, name) for name in unit.tasks)
    return next((cache for cache in found if cache and cache.phase != "ready"), None)


def progress_of(cache: CacheState) -> Progress:
    """What a task does that waits for its caches."""
    if cache.said:
        return Progress(doing="teacher cache: will be tried again")
    done = f"{cache.rows / cache.total:.0%}" if cache.total else "to begin" if cache.phase == "waiting" else "starting"
    return Progress(doing=f"teacher cache: {done}")


def holders(state: State, request: RunRequest, names: Iterable[str]) -> dict[str, list[str]]:
    """Ids of the living nodes that have the caches of tasks, by the digests of their parcels."""
    found: dict[str, list[str]] = {}
    for cache in filter(None, (cache_of(state, request, name) for name in names)):
        nodes = [node for address in cache.at if (node := state.node_at(address))]
        found |= dict.fromkeys(digests_of(cache), nodes)
    return found


def digests_of(cache: CacheState) -> list[str]:
    """The digests of the parcels of caches."""
    return [found[0] for value in cache.parcels.values() if (found := sent_name(value))]
