"""A cluster that a driver's calls can be tested with: a coordinator and hosts as plain values, without Ray."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import Any

from wgpu_lora.cluster.cluster_connection import ClusterGone
from wgpu_lora.cluster.messages import (
    DeviceFacts,
    DeviceView,
    NodeFacts,
    Progress,
    RunRequirements,
    RunView,
    Snapshot,
    TaskView,
    Versions,
    to_plain,
)
from wgpu_lora.errors import UserError

VERSIONS = Versions("1.0", "c" * 64, "5" * 64, "3.11.7", "2.60.0", "0.30")
UNIT, DIGEST = "r/a", "d" * 64


def device_facts(address: str, index: int = 0, name: str = "llvmpipe", **more: Any) -> DeviceFacts:
    given = {"driver": "Mesa", "kind": "CPU", "backend": "Vulkan", "plan_class": "p", "budget": 1 << 30, **more}
    return DeviceFacts(f"webgpu:{name}-{index}", address, index, name, **given)


def node_facts(host: str, *devices: DeviceFacts, versions: Versions = VERSIONS) -> NodeFacts:
    return NodeFacts(f"id-{host}", f"10.0.0.{len(host)}", host, versions, list(devices))


def task_view(name: str, state: str = "running", step: int = 1, **more: Any) -> TaskView:
    progress = Progress(step, 10, **{k: more.pop(k) for k in ("loss", "eval_loss", "tokens_per_second") if k in more})
    return TaskView("r", name, state, more.pop("device", None), progress, more.pop("output", f"/out/{name}"), **more)


def snapshot(*tasks: TaskView, over: bool = False, nodes: tuple[NodeFacts, ...] = (), **more: Any) -> Snapshot:
    views = [DeviceView(one, "busy") for node in nodes for one in node.devices]
    return Snapshot(0.0, [RunView("r", "me@here", 0.0, over)], list(tasks), views, list(nodes), **more)


@dataclass
class FakeCluster:
    """Answers as the actors do.

    Attributes:
        snapshots: one after the other; the last one stays. None is a coordinator that does not answer.
        files: contents of results, by task and path. damaged: paths that arrive with other bytes.
        lacking: paths that hosts cannot read, by the host's name.
        plans: by task. refused: why a submitted run is.
    """

    nodes: list[NodeFacts] = field(default_factory=list)
    snapshots: list[Snapshot | None] = field(default_factory=list)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    lacking: dict[str, set[str]] = field(default_factory=dict)
    plans: dict[str, RunRequirements] = field(default_factory=dict)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    fetched: set[str] = field(default_factory=set)
    sent: dict[str, bytes] = field(default_factory=dict)
    breaks_after: int | None = None  # reads
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    def coordinator(self, method: str, *args: Any, seconds: float = 0) -> Any:
        return self.call("coordinator", method, *args)

    def call(self, actor: str, method: str, *args: Any, data: bytes | None = None, seconds: float = 0) -> Any:
        self.calls.append((actor, method, *args))
        json.dumps(args)
        host = actor.removeprefix("host:id-")
        return getattr(self, f"_{method}")(host, *args, *([data] if data is not None else []))

    def _evaluations(self, _: str, run: str) -> Any:
        return self.evaluations

    def _nodes(self, _: str) -> Any:
        return [to_plain(node) for node in self.nodes]

    def _snapshot(self, _: str, run: str | None) -> Any:
        seen = self.snapshots.pop(0) if len(self.snapshots) > 1 else self.snapshots[0]
        if seen is None:
            raise ClusterGone("The cluster does not answer: see whether its head is running.")
        if run is not None and all(one.name != run for one in seen.runs):
            raise UserError(f"No run {run}.")
        tasks = [replace(one, fetched=one.fetched or one.name in self.fetched) for one in seen.tasks]
        return to_plain(replace(seen, tasks=tasks))

    def _results(self, _: str, run: str) -> Any:
        return [
            {"task": task, "unit": UNIT, "digest": DIGEST, "host": "h", "files": listing(files)}
            for task, files in self.files.items()
            if task not in self.fetched
        ]

    def _fetched(self, _: str, run: str, task: str) -> None:
        self.fetched.add(task)

    def _read(self, _: str, unit: str, digest: str, path: str, offset: int, size: int) -> bytes:
        if self.breaks_after is not None:
            self.breaks_after -= 1
            if self.breaks_after < 0:
                raise ClusterGone("The cluster does not answer: see whether its head is running.")
        assert (unit, digest) == (UNIT, DIGEST)
        _, task, inside = path.split("/", 2)
        data = self.files[task][inside][offset : offset + size]
        return bytes(len(data)) if inside in self.damaged else data

    def _check_paths(self, host: str, paths: list[str]) -> dict[str, str]:
        return {path: "it does not exist there" for path in paths if path in self.lacking.get(host, ())}

    def _check_outputs(self, host: str, tasks: list[dict[str, Any]]) -> None:
        for task in tasks:
            if task["output"] in self.lacking.get(host, ()):
                raise UserError(f"The output directory {task['output']} is in use.")

    def _plan(self, _: str, tasks: list[dict[str, Any]], index: int, joined: None, shared: bool, cached: bool) -> Any:
        usual = RunRequirements(needed=1 << 20, base="b", work=10, steps=10)
        plans = {one["name"]: to_plain(self.plans.get(one["name"], usual)) for one in tasks}
        taught = {
            one["name"]: {"digest": "caches", "needs": to_plain(replace(usual, needed=1 << 10))}
            for one in tasks
            if cached and "teacher" in one["options"]
        }
        return {"tasks": plans, "joined": [], "taught": taught}

    def _sent(self, host: str, digest: str) -> bool:
        return False

    def _begin_sent(self, host: str, parcel: dict[str, Any]) -> dict[str, int]:
        return {file["digest"]: 0 for file in parcel["files"]}

    def _put_sent(self, host: str, parcel: str, digest: str, offset: int, data: bytes) -> None:
        before = self.sent.get(f"{host} {digest}", b"")
        assert offset == len(before)
        self.sent[f"{host} {digest}"] = before + data

    def _commit_sent(self, host: str, parcel: dict[str, Any]) -> str:
        for file in parcel["files"]:
            assert hashlib.sha256(self.sent[f"{host} {file['digest']}"]).hexdigest() == file["digest"]
        return "/there"


def listing(files: dict[str, bytes]) -> list[dict[str, Any]]:
    """Files as a coordinator lists them."""
    return [
        {"path": path, "digest": hashlib.sha256(data).hexdigest(), "size": len(data)} for path, data in files.items()
    ]
