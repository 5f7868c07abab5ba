"""What is being done: orders to devices, and what these report."""

from __future__ import annotations

from dataclasses import dataclass, field

from wgpu_lora.cluster.facts.requests import Task


@dataclass(frozen=True)
class Order:
    """What the coordinator asks a device to do: train the tasks of one unit, in one process.

    Attributes:
        unit: `<run>/<first task>`, the same for all its epochs. epoch: counts how often the unit was placed, from 1.
            Whatever is said or written with an older epoch is refused.
        tasks: several are one pipeline. save_steps, mirror_steps: of checkpoints and of their copies.
        shelf: id of the node whose host keeps the copies; empty: the device's own host. results: likewise, that keeps
            the last one; empty: the same.
        restore: the copy to resume from, by its digest in the shelf; None: from the beginning.
        restore_from: id of the node whose host has that copy.
        parcels: ids of the nodes that have the teacher caches of the tasks, by their digests.
        helpers: ids of the other devices of a data-parallel task.
        heldout_elsewhere: whether held-out losses are measured on another device.
        lease: seconds without an answer from the coordinator after which the device ends the job by itself.
    """

    run: str
    unit: str
    epoch: int
    tasks: list[Task]
    save_steps: int
    mirror_steps: int
    shelf: str = ""
    results: str = ""
    restore: str | None = None
    restore_from: str = ""
    parcels: dict[str, list[str]] = field(default_factory=dict)
    helpers: list[str] = field(default_factory=list)
    heldout_elsewhere: bool = False
    lease: float = 30.0


@dataclass(frozen=True)
class CacheStanding:
    """What an evaluation device says about the teacher caches of some tasks.

    Attributes:
        rows, total: finished, and of all caches; 0 before the first.
        parcels: once they are complete, the values of the tasks' options, such as `sent:DIGEST/NAME`, by name.
        hosts: ids of the nodes that have them.
        ended: why there are none: `failed`, `refused`, `no room` or `killed`, as a Report has it, or `away`, the device
            does not answer; None otherwise.
        said: a sentence.
    """

    rows: int = 0
    total: int = 0
    parcels: dict[str, str] = field(default_factory=dict)
    hosts: list[str] = field(default_factory=list)
    ended: str | None = None
    said: str = ""


@dataclass(frozen=True)
class Progress:
    """The newest values of a task, as its worker's events tell them."""

    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    eval_loss: float | None = None
    best_eval_loss: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    doing: str = ""  # in a few words, while no step is taken: waiting, loading, tuning


@dataclass(frozen=True)
class Copy:
    """A complete copy of a unit's directory in a shelf. digest: of its list of files. steps: by task. host: id of the
    node on whose host the shelf is. final: the results are complete."""

    unit: str
    epoch: int
    digest: str
    steps: dict[str, int]
    bytes: int
    final: bool = False
    host: str = ""


@dataclass(frozen=True)
class Report:
    """What a device tells the coordinator about a unit, at least every few seconds while it has it.

    Attributes:
        progress: by task. saved: the step of the newest checkpoint, by task.
        copy: a new copy that the shelf has accepted since the last report.
        outcomes: of tasks that have ended: `finished`, `stopped`, `failed`, ... as `train.run.stop_reasons` names them.
        ended: None while the process runs, else `done`, `failed` (the process failed), `refused` (a user's error, which
            another device would not mend), `no room` (memory that others hold), `no copy` (the one to resume from is
            missing or damaged), `killed` (by a signal from outside) or `stopped` (as it was asked to).
        said: why, a sentence.
    """

    unit: str
    epoch: int
    progress: dict[str, Progress] = field(default_factory=dict)
    saved: dict[str, int] = field(default_factory=dict)
    copy: Copy | None = None
    outcomes: dict[str, str] = field(default_factory=dict)
    ended: str | None = None
    said: str = ""


@dataclass(frozen=True)
class Answer:
    """The coordinator's answer to a report, which renews the lease. go_on: False ends the process at once, without a
    last copy, since the unit is another device's. end: tasks to end, with their results. cancel: end all
    of them, with a last copy."""

    go_on: bool = True
    end: list[str] = field(default_factory=list)
    cancel: bool = False
