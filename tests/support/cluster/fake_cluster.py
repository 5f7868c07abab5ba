"""A cluster that a driver's calls can be tested with: a controller and hosts as plain values, without Ray."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from wgpu_lora.cluster import checkpoint_store
from wgpu_lora.cluster.checkpoint_store import DamagedCheckpoint, HostStore
from wgpu_lora.cluster.cluster_connection import ClusterGone
from wgpu_lora.cluster.messages import (
    DeviceFacts,
    DeviceView,
    NodeFacts,
    Parcel,
    RunView,
    Snapshot,
    StoredFile,
    Task,
    TaskProgress,
    TaskView,
    Versions,
)
from wgpu_lora.errors import UserError
from wgpu_lora.train.memory import RunRequirements

VERSIONS = Versions("1.0", "c" * 64, "5" * 64, "3.11.7", "2.60.0", "0.30")
UNIT = "r/a"


def device_facts(address: str, index: int = 0, name: str = "llvmpipe", **more: Any) -> DeviceFacts:
    facts = {"driver": "Mesa", "kind": "CPU", "backend": "Vulkan", "plan_class": "p", "budget": 1 << 30, **more}
    return DeviceFacts(f"webgpu:{name}-{index}", address, index, name, **facts)


def node_facts(host: str, *devices: DeviceFacts, versions: Versions = VERSIONS) -> NodeFacts:
    return NodeFacts(f"id-{host}", f"10.0.0.{len(host)}", host, versions, list(devices))


def task_view(name: str, state: str = "running", step: int = 1, **more: Any) -> TaskView:
    progress = TaskProgress(
        step, 10, **{k: more.pop(k) for k in ("loss", "eval_loss", "tokens_per_second") if k in more}
    )
    return TaskView("r", name, state, more.pop("device", None), progress, more.pop("output", f"/out/{name}"), **more)


def snapshot(*tasks: TaskView, over: bool = False, nodes: tuple[NodeFacts, ...] = (), **more: Any) -> Snapshot:
    views = [DeviceView(device, "busy") for node in nodes for device in node.devices]
    return Snapshot(0.0, [RunView("r", "me@here", 0.0, over)], list(tasks), views, list(nodes), **more)


@dataclass
class FakeCluster:
    """Answers as `cluster_connection.Cluster` does.

    Attributes:
        snapshots: one after the other; the last one stays. None is a controller that does not answer.
        files: contents of results, by task and path. damaged: paths that arrive with other bytes. absent: paths that
            no host has.
        lacking: paths that hosts cannot read, by the host's name.
        plans: by task.
        calls: the actor, the method and the arguments of each.
        sent: contents by host and digest. placed: parcels by host.
    """

    nodes: list[NodeFacts] = field(default_factory=list)
    snapshots: list[Snapshot | None] = field(default_factory=list)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    absent: set[str] = field(default_factory=set)
    lacking: dict[str, set[str]] = field(default_factory=dict)
    plans: dict[str, RunRequirements] = field(default_factory=dict)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    fetched: set[str] = field(default_factory=set)
    sent: dict[tuple[str, str], bytes] = field(default_factory=dict)
    placed: list[tuple[str, Parcel]] = field(default_factory=list)
    breaks_after: int | None = None  # pieces
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    def controller(self, method: str, *arguments: Any, seconds: float = 0) -> Any:
        self.calls.append(("controller", method, *arguments))
        return getattr(self, f"_{method}")(*arguments)

    def host(self, node: str, method: str, *arguments: Any, seconds: float = 0) -> Any:
        self.calls.append((node, method, *arguments))
        return getattr(self, f"_{method}")(node.removeprefix("id-"), *arguments)

    def store(self, node: str, storage: str | None = None) -> HostStore:
        more = [storage] if storage else []
        return HostStore(lambda method, *arguments: self.host(node, method, *arguments, *more))

    def close(self) -> None: ...

    # -- the controller --------------------------------------------------------------------------------------------

    def _evaluations(self, run: str) -> Any:
        return self.evaluations

    def _nodes(self) -> Any:
        return [asdict(node) for node in self.nodes]

    def _snapshot(self, run: str | None) -> Any:
        snapshot = self.snapshots.pop(0) if len(self.snapshots) > 1 else self.snapshots[0]
        if snapshot is None:
            raise ClusterGone("The cluster does not answer: see whether its head is running.")
        if run is not None and all(view.name != run for view in snapshot.runs):
            raise UserError(f"No run {run}.")
        tasks = [replace(task, fetched=task.fetched or task.name in self.fetched) for task in snapshot.tasks]
        return asdict(replace(snapshot, tasks=tasks))

    def _results(self, run: str) -> Any:
        return [
            {
                "task": task,
                "unit": UNIT,
                "nodes": ["id-h"],
                "storage": None,
                "files": list(map(asdict, stored(files))),
            }
            for task, files in self.files.items()
            if task not in self.fetched
        ]

    def _fetched(self, run: str, task: str) -> None:
        self.fetched.add(task)

    # -- hosts -----------------------------------------------------------------------------------------------------

    def _piece(self, host: str, unit: str, digest: str, offset: int, storage: str | None = None) -> bytes:
        if self.breaks_after is not None:
            self.breaks_after -= 1
            if self.breaks_after < 0:
                raise ClusterGone("The cluster does not answer: see whether its head is running.")
        assert unit == UNIT
        for files in self.files.values():
            for path, data in files.items():
                if hashlib.sha256(data).hexdigest() == digest and path not in self.absent:
                    piece = data[offset : offset + checkpoint_store.PIECE]
                    return bytes(len(piece)) if path in self.damaged else piece
        raise DamagedCheckpoint(f"{digest[:12]} is missing")

    def _check_paths(self, host: str, paths: list[str]) -> dict[str, str]:
        return {path: "it does not exist there" for path in paths if path in self.lacking.get(host, ())}

    def _check_outputs(self, host: str, tasks: list[Task]) -> None:
        for task in tasks:
            if task.output in self.lacking.get(host, ()):
                raise UserError(f"The output directory {task.output} is in use.")

    def _plan(self, host: str, tasks: list[dict[str, Any]], index: int, shared: bool, cached: bool) -> Any:
        usual = RunRequirements(needed=1 << 20, base="b", work=10, steps=10)
        plans = {task["name"]: asdict(self.plans.get(task["name"], usual)) for task in tasks}
        taught = {
            task["name"]: {"digest": "caches", "needs": asdict(replace(usual, needed=1 << 10))}
            for task in tasks
            if cached and "teacher" in task["options"]
        }
        return {"tasks": plans, "taught": taught}

    def _listed(self, host: str, unit: str) -> list[str]:
        return [digest for name, digest in self.sent if name == host]

    def _append(self, host: str, unit: str, digest: str, offset: int, data: bytes, size: int) -> None:
        before = self.sent.get((host, digest), b"")
        assert offset == len(before)
        self.sent[host, digest] = before + data

    def _place(self, host: str, parcel: Parcel) -> str:
        for file in parcel.files:
            assert hashlib.sha256(self.sent[host, file.digest]).hexdigest() == file.digest
        self.placed.append((host, parcel))
        return "/there"


def stored(files: dict[str, bytes]) -> list[StoredFile]:
    """Files as a commit lists them."""
    return [StoredFile(path, hashlib.sha256(data).hexdigest(), len(data)) for path, data in files.items()]
