"""Workers that take turns: while one computes, the others wait.

This package's side is the job `step` (kinds/step.py); the PyTorch one is in scripts/bench_reference.py, since nothing
here needs PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wgpu_lora.worker.parent import Worker, WorkerFailed

Record = dict[str, Any]


def take_turns(sides: Mapping[str, Worker], rounds: int, steps: int) -> dict[str, Record]:
    """Prepares every side, then has each take `steps` steps in every round, one side at a time.

    Returns:
        side -> what it said of itself, and `seconds` of all its steps; `not_run` and why, for a side that ended.
    """
    found: dict[str, Record] = {}

    def asked(name: str, request: str, **values: Any) -> Record | None:
        if "not_run" in found.get(name, {}):
            return None
        try:
            return sides[name].ask(request, **values)
        except WorkerFailed as error:
            found[name] = {"not_run": str(error)}
            return None

    for name in sides:
        prepared = asked(name, "prepare")
        if prepared is not None:
            found[name] = {**prepared, "seconds": []}
    for _ in range(rounds):
        for name in sides:
            took = asked(name, "steps", count=steps)
            if took is not None:
                found[name]["seconds"] += took["seconds"]
    for name in sides:
        memory = asked(name, "memory")
        if memory is not None:
            found[name] |= memory
    return found
