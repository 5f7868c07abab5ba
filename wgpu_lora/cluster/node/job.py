"""An order as a job of a worker: its options, and the directory that it trains in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wgpu_lora.cluster.facts import Order, Task
from wgpu_lora.cluster.node.layout import ADAPTERS, PIPELINE, checked_part
from wgpu_lora.errors import UserError
from wgpu_lora.train.adapter_tasks import split_options

NEVER = 1 << 30  # steps between held-out losses that another device measures
OURS = ("output", "device", "resume", "overwrite", "requests")  # not a task's to say


@dataclass(frozen=True)
class Job:
    """A worker's job: its kind and its options."""

    kind: str
    options: dict[str, Any]


def job_of(order: Order, directory: Path, device: int, *, resume: bool) -> Job:
    """The job that trains the tasks of an order in a unit's directory.

    The tasks' options must have the paths of this host. Their own `save_steps` counts if it is less than the order's.

    Raises:
        UserError: a task's name is no part of a path, or two are alike.
    """
    names = [checked_part(task.name) for task in order.tasks]
    if not names or len({name.casefold() for name in names}) < len(names):
        raise UserError(f"The order for {order.unit} has no tasks, or two with one name: name each differently.")
    places = {name: str(directory / ADAPTERS / name) for name in names}
    ours: dict[str, Any] = {"device": device, "requests": True} | ({"resume": True} if resume else {})
    if len(order.tasks) == 1:
        (task,) = order.tasks
        options = _options(task, order)
        return Job("finetune", {**options, **ours, "output": places[task.name]})
    split = [split_options(_options(task, order)) for task in order.tasks]
    adapters = [{**own, "name": name, "checkpoint": places[name]} for name, (own, _) in zip(names, split, strict=True)]
    shared = {**split[0][1], "save_steps": min(common["save_steps"] for _, common in split)}
    output = str(directory / PIPELINE)
    return Job("pipeline", {**shared, **ours, "adapters": adapters, "output": output})


def _options(task: Task, order: Order) -> dict[str, Any]:
    given = {name: value for name, value in task.options.items() if value is not None and name not in OURS}
    own = given.get("save_steps") or order.save_steps
    given["save_steps"] = min(own, order.save_steps) if order.save_steps > 0 else own
    if order.heldout_elsewhere:
        given |= {"eval_steps": NEVER, "eval_on_start": False}
    return given
