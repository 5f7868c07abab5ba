"""What is to be done: tasks, their plans, and runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from wgpu_lora.train.memory import RunRequirements


@dataclass(frozen=True)
class Task:
    """An adapter to train.

    Attributes:
        name: unique in its run, [A-Za-z0-9._-], for files too.
        options: of `finetune`, by the names of TrainingArguments, as JSON; without `output`, `device` and `resume`.
        output: the directory of the result: of the machine that runs `cluster run`, or in the shared folder.
        params: of a sweep, for its table.
    """

    name: str
    options: dict[str, Any]
    output: str
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Taught:
    """A task with a teacher, of which the evaluation device makes a cache: its plans are those with the cache.

    caches: equal for tasks that share one. live: plans with the teacher beside the student, should there be no cache.
    """

    caches: str
    live: dict[str, RunRequirements]


@dataclass(frozen=True)
class Sweep:
    """How a sweep compares its tasks. metric: `eval_loss` or `loss`, lower is better.

    scheduler: `none`, or `asha`, with its grace period in steps and its reduction factor.
    """

    metric: str = "eval_loss"
    scheduler: str = "none"
    grace_period: int = 1
    reduction_factor: float = 4.0


@dataclass(frozen=True)
class RunRequest:
    """What `cluster run` asks the coordinator for.

    Attributes:
        name: of the run, unique in the cluster while it is known; for directories, too.
        plans: by task name and plan class.
        shared: the shared folder that results are written to; None: the driver fetches them.
        mirror_steps: steps between copies of checkpoints on another machine.
        join: whether tasks of one base may be joined into pipelines: `auto` (where it is faster), `always` or `never`.
        data_parallel: devices per task.
        jobs_per_device: how many jobs a device runs at once.
        eval_device: id of the device that measures held-out losses and caches teachers beside training; None: the
            training device.
        taught: tasks with a teacher that is cached, by name.
        by: user and host, for `status`.
    """

    name: str
    tasks: list[Task]
    plans: dict[str, dict[str, RunRequirements]]
    shared: str | None = None
    mirror_steps: int = 50
    join: str = "auto"
    data_parallel: int = 1
    jobs_per_device: int = 1
    eval_device: str | None = None
    sweep: Sweep | None = None
    by: str = ""
    taught: dict[str, Taught] = field(default_factory=dict)
