"""Workers that take turns: while one computes, the others wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wgpu_lora.worker.parent import Worker, WorkerFailed

Record = dict[str, Any]


def take_turns(sides: Mapping[str, Worker], rounds: int, steps: int) -> dict[str, Record]:
    """Prepares every side, then has each take `steps` steps in every round, one side at a time.

    Returns:
        side -> its answers, with `seconds` of all its steps; `not_run` and why, for a side that ended.
    """
    found: dict[str, Record] = {name: {"seconds": []} for name in sides}

    def ask(request: str, **values: Any) -> None:
        for name, side in sides.items():
            if "not_run" not in found[name]:
                try:
                    answer = side.ask(request, **values)
                    found[name] |= answer | {"seconds": found[name]["seconds"] + answer.get("seconds", [])}
                except WorkerFailed as error:
                    found[name] = {"not_run": str(error)}

    ask("prepare")
    for _ in range(rounds):
        ask("steps", count=steps)
    ask("memory")
    return found
