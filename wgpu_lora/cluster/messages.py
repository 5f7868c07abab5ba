"""What the processes of a cluster and their users exchange: dataclasses of JSON values, sent by `asdict`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from wgpu_lora.cluster.cluster_file import SweepOptions
from wgpu_lora.files.typed_json import typed
from wgpu_lora.train.memory import RunRequirements

NAMESPACE = "wgpu-lora"  # of all actors, in Ray
CONTROLLER = "run-controller"
SENT = "sent:"  # begins the value of an option that is a parcel: sent:DIGEST/NAME
T = TypeVar("T")


def from_plain(kind: type[T], value: Any) -> T:
    """A message from JSON values of this or a newer version.

    Raises:
        ValueError: a field is missing or has another type.
    """
    return typed(kind, value, kind.__name__)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class DeviceFacts:
    """A WebGPU device of a node.

    Attributes:
        key: the name of its resource in Ray, `webgpu:<uuid or pci address>`; unique on its host only.
        address: of its host, as Ray knows it. index: in `list_devices` of its host.
        plan_class: equal for devices on which every job needs the same memory: same limits, features and backend.
        budget: bytes that all programs together may hold; None if unknown. held: bytes that leases hold now.
        free: bytes that a new job could get now: of the budget less the leases, and of what the system reports.
        leases: who holds how much, as `share status` shows it.
        speed: processed tokens/s of the speed brick; None if not measured yet.
        joined_speedup: tokens/s of several adapters in one pipeline over one after another, measured.
    """

    key: str
    address: str
    index: int
    name: str
    driver: str
    kind: str
    backend: str
    plan_class: str
    budget: int | None = None
    held: int = 0
    free: int | None = None
    leases: list[str] = field(default_factory=list)
    speed: float | None = None
    joined_speedup: float | None = None

    @property
    def id(self) -> str:
        """Unique in the cluster, also after its node has restarted."""
        return f"{self.address}/{self.key}"


@dataclass(frozen=True)
class Versions:
    """What must agree on all machines. code: SHA-256 of the package's Python files; shaders: of the shaders."""

    package: str
    code: str
    shaders: str
    python: str
    ray: str
    wgpu: str


@dataclass(frozen=True)
class NodeFacts:
    """A machine of the cluster. id: Ray's, which changes with each start; host: its name, for people."""

    id: str
    address: str
    host: str
    versions: Versions
    devices: list[DeviceFacts]


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
class CachedTeacher:
    """The teacher of a task, of which the evaluation device makes a cache. The task's plans are those with the cache.

    cache: equal for tasks that share one. live: plans with the teacher beside the student, should there be no cache.
    """

    cache: str
    live: dict[str, RunRequirements]


@dataclass(frozen=True)
class StoredFile:
    """A file in a store. path: relative, with slashes. digest: SHA-256. size: bytes."""

    path: str
    digest: str
    size: int


@dataclass(frozen=True)
class Parcel:
    """A file or a folder by its content.

    Attributes:
        digest: of its list of files; names its folder on the hosts. name: of the file or folder in that.
    """

    digest: str
    name: str
    files: list[StoredFile]

    @property
    def value(self) -> str:
        """The value of an option instead of the path."""
        return f"{SENT}{self.digest}/{self.name}"

    @property
    def unit(self) -> str:
        """Its files in a store."""
        return f"sent/{self.digest}"


@dataclass(frozen=True)
class RunRequest:
    """A run as `cluster run` submits it.

    Attributes:
        name: of the run, unique in the cluster while it is known; for directories, too.
        plans: by task name and plan class.
        shared: the shared folder that results are written to; None: the driver fetches them.
        storage: URL of the folder or bucket for checkpoints that all machines reach; None: hosts keep each other's.
        mirror_steps: steps between checkpoints that are stored.
        join: whether tasks of one base may be joined into pipelines: `auto` (where it is faster), `always` or `never`.
        data_parallel: devices per task.
        jobs_per_device: how many jobs a device runs at once.
        eval_device: id of the device that measures held-out losses and caches teachers; None: the training device.
        teachers: of tasks whose teacher is cached, by name. parcels: data that was sent.
        by: user and host, for `status`.
    """

    name: str
    tasks: list[Task]
    plans: dict[str, dict[str, RunRequirements]]
    shared: str | None = None
    storage: str | None = None
    mirror_steps: int = 50
    join: str = "auto"
    data_parallel: int = 1
    jobs_per_device: int = 1
    eval_device: str | None = None
    sweep: SweepOptions | None = None
    by: str = ""
    teachers: dict[str, CachedTeacher] = field(default_factory=dict)
    parcels: list[Parcel] = field(default_factory=list)


@dataclass(frozen=True)
class Commit:
    """A complete state of a unit's directory in the store.

    generation: of the actor that wrote it. steps: by task. hosts: addresses of those that keep it; empty: `storage`.
    final: the results are complete. outcomes: of the tasks then, as a Report has them.
    """

    unit: str
    generation: int
    steps: dict[str, int]
    files: list[StoredFile]
    hosts: list[str] = field(default_factory=list)
    final: bool = False
    outcomes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Order:
    """The tasks of one unit for a training actor.

    Attributes:
        unit: `<run>/<first task>`. generation: counts how often the unit was placed, from 1.
        tasks: several are one pipeline. key: of the device.
        save_steps, mirror_steps: steps between checkpoints, and between those that are stored.
        resume: the commit to go on from; None: from the beginning. hosts: ids of the nodes that may have its files.
        mirrors: ids of the nodes that keep checkpoints beside this one.
        replicas: names of the actors that compute parts of each step.
        heldout_elsewhere: whether held-out losses are measured on another device.
        parcels: files that options name.
    """

    run: str
    unit: str
    generation: int
    tasks: list[Task]
    key: str
    save_steps: int
    mirror_steps: int
    resume: Commit | None = None
    hosts: list[str] = field(default_factory=list)
    mirrors: list[str] = field(default_factory=list)
    storage: str | None = None
    replicas: list[str] = field(default_factory=list)
    heldout_elsewhere: bool = False
    parcels: list[Parcel] = field(default_factory=list)


@dataclass(frozen=True)
class TaskProgress:
    """The newest values of a task. doing: in a few words, while no step is taken: waiting, loading, tuning."""

    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    eval_loss: float | None = None
    best_eval_loss: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    doing: str = ""


@dataclass(frozen=True)
class Report:
    """The state of a training actor.

    Attributes:
        progress: by task. outcomes: of tasks that have ended, as `train.run.stop_reasons` names them.
        ended: None while it trains, else `done`, `failed`, `refused` (a user's error, which another device would not
            mend), `no room` (memory that others hold), `no checkpoint` (the one to resume from is missing or damaged)
            or `stopped` (cancelled).
        reason: a sentence.
    """

    progress: dict[str, TaskProgress] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)
    ended: str | None = None
    reason: str = ""


@dataclass(frozen=True)
class TaskView:
    """A task in tables. state: pending, starting, running, moving, finished, failed, cancelled or stopped."""

    run: str
    name: str
    state: str
    device: str | None
    progress: TaskProgress
    output: str
    attempts: int = 1
    reason: str = ""
    fetched: bool = False
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceView:
    """A device in tables. state: idle, busy, quarantined or gone."""

    facts: DeviceFacts
    state: str
    units: list[str] = field(default_factory=list)
    tokens_per_second: float | None = None
    failures: int = 0


@dataclass(frozen=True)
class RunView:
    name: str
    by: str
    began: float
    over: bool
    shared: str | None = None
    sweep: SweepOptions | None = None


@dataclass(frozen=True)
class EventLine:
    """Something that happened, such as a move. time: seconds since the epoch."""

    time: float
    text: str


@dataclass(frozen=True)
class Snapshot:
    """The state of a cluster for `cluster status`, `run` and `attach`. events: the newest lines, oldest first."""

    time: float
    runs: list[RunView]
    tasks: list[TaskView]
    devices: list[DeviceView]
    nodes: list[NodeFacts]
    events: list[EventLine] = field(default_factory=list)
