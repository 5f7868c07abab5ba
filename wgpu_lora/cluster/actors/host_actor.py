"""The actor of a host: what it has, plans of tasks, and its folder of checkpoints and sent data."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from wgpu_lora.cluster.checkpoint_store import DamagedCheckpoint, FolderStore, HostStore, Store, shared_store
from wgpu_lora.cluster.cluster_paths import (
    allowed_roots,
    checkpoints_directory,
    cluster_root,
    node_paths,
    on_node,
    options_here,
    parcels_of,
    refused_path,
    sent_directory,
    unreadable,
)
from wgpu_lora.cluster.data_upload import place_parcel
from wgpu_lora.cluster.device_resources import devices_here, measure_speed, node_devices
from wgpu_lora.cluster.messages import NAMESPACE, SENT, NodeFacts, Parcel, StoredFile, Task, Versions
from wgpu_lora.cluster.node_versions import own_versions
from wgpu_lora.cluster.task_outputs import check_outputs, fetch
from wgpu_lora.cluster.worker.worker import Worker, WorkerFailed
from wgpu_lora.errors import StorageError, UserError

CALL_SECONDS = 30.0
PLAN_SECONDS = 600.0  # that the plans of a request may take
KEEP_SECONDS = 30 * 86400.0  # longer than results are kept, and than a machine is usually away
CALLS = 16  # that an actor answers at once


class HostActor:
    """One per node."""

    def __init__(self, node: str, address: str):
        reset_environment()
        self._node, self._address = node, address
        self._store = FolderStore(checkpoints_directory())
        self._versions: Versions | None = None
        threading.Thread(target=remove_old_files, daemon=True).start()

    def survey(self) -> dict[str, Any]:
        """The node's NodeFacts as JSON values, which other versions can read."""
        self._versions = self._versions or own_versions()
        devices = node_devices(self._address)
        return asdict(NodeFacts(self._node, self._address, socket.gethostname(), self._versions, devices))

    def measure(self, key: str) -> dict[str, Any]:
        """The speed of a device, see `device_resources.measure_speed`."""
        for device in node_devices(self._address):
            if device.key == key:
                return asdict(measure_speed(devices_here()[device.index]))
        raise UserError(f"There is no device {key} on {self._address} any more: look at 'wgpu-lora cluster status'.")

    def plan(
        self, tasks: list[dict[str, Any]], index: int, shared: bool = False, cached: bool = False
    ) -> dict[str, Any]:
        """Plans of tasks, {"name", "options"}, on the device with this index, as the job `plan` makes them.

        shared: each of them is trained by several devices together. cached: also without their teachers.
        """
        tasks = [{"name": task["name"], "options": options_here(task["options"])} for task in tasks]
        options = {"tasks": tasks, "device": index, "shared": shared, "cached": cached}
        try:
            with Worker("plan", options, timeout=PLAN_SECONDS) as worker:
                plans: dict[str, Any] = worker.result()
                return plans
        except WorkerFailed as error:
            raise UserError(f"The tasks could not be planned on {self._address}: {error}") from None

    def check_paths(self, paths: list[str]) -> dict[str, str]:
        """Those of these paths of tasks' options that cannot be read here, each with why, as part of a sentence."""
        problems = {}
        for path in paths:
            node_path = str(on_node({"data": path}, node_paths(), sent_directory())["data"])
            if why := unreadable(node_path, [] if path.startswith(SENT) else allowed_roots()):
                problems[path] = why
        return problems

    def check_outputs(self, tasks: list[Task]) -> None:
        """Refuses tasks whose output directories, in a shared folder, are in use, another's, or not allowed here."""
        for task in tasks:
            if refusal := refused_path(task.output, allowed_roots()):
                raise UserError(f"The output directory {task.output} of {task.name} {refusal}: choose another.")
        check_outputs(tasks)

    # -- checkpoints and data ------------------------------------------------------------------------------------------

    def listed(self, unit: str) -> list[str]:
        return sorted(self._store.listed(unit))

    def append(self, unit: str, digest: str, offset: int, data: bytes, size: int) -> None:
        self._store.append(unit, digest, offset, data, size)

    def piece(self, unit: str, digest: str, offset: int, storage: str | None = None) -> bytes:
        """A piece of a file of a checkpoint, here or in the storage of all hosts; empty at its end."""
        store = shared_store(storage) if storage else self._store
        return store.piece(unit, digest, offset)

    def remove(self, unit: str, digests: list[str]) -> None:
        self._store.remove(unit, digests)

    def check_storage(self, storage: str, name: str, write: bool) -> bool:
        """Whether this host finds a small file of this name in a storage. Raises StorageError if it cannot write it."""
        return shared_store(storage).check(name, write)

    def place(self, parcel: Parcel) -> str:
        """The path of a parcel whose files have been sent here."""
        return str(place_parcel([self._store], parcel))

    def forget(self, run: str, parcels: Collection[Parcel] = (), storage: str | None = None) -> None:
        """Remove everything of a run from this host and the storage, also these parcels, the run's teacher caches."""
        self._store.forget(run)
        if storage:
            shared_store(storage).forget(run)
        for part in ("units", "caches"):
            shutil.rmtree(cluster_root() / part / run, ignore_errors=True)
        for parcel in parcels:
            shutil.rmtree(sent_directory() / parcel.digest, ignore_errors=True)
            self._store.remove(parcel.unit, self._store.listed(parcel.unit))

    def publish(
        self, unit: str, task: str, files: list[StoredFile], output: str, shared: str, storage: str | None
    ) -> None:
        """Write a result from the checkpoints of this host, or the storage, to a directory in a shared folder.

        Raises:
            UserError: the folder is not there, or the directory is not allowed, has other files, or cannot be written.
        """
        if refusal := refused_path(output, allowed_roots()):
            raise UserError(f"The output directory {output} of {task} {refusal}: choose another.")
        if not Path(shared).is_dir():
            raise UserError(f"The result of {task} cannot be written: this host has no {shared}: mount it there.")
        store = shared_store(storage) if storage else self._store
        if not fetch([store], unit, task, files, Path(output)):
            raise UserError(f"{output} is being written by another program: wait for it.")


def on_this_node(name: str, node: str, **options: Any) -> dict[str, Any]:
    """Options of a detached actor on a node."""
    return {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_concurrency": CALLS,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        **options,
    }


def host_actor(node: str) -> Any:
    """The handle of the actor of a node's host, which is made if there is none. Raises ConnectionError."""
    for entry in ray.nodes():
        if entry["NodeID"] == node and entry["Alive"]:
            options = on_this_node(f"host:{node}", node, max_restarts=-1, max_task_retries=1)
            return ray.remote(HostActor).options(**options).remote(node, str(entry["NodeManagerAddress"]))
    raise ConnectionError(f"Ray has no living node {node:.8}")


def call_host(node: str, method: str, *arguments: Any, seconds: float = CALL_SECONDS) -> Any:
    """Call a method of a host's actor.

    Raises:
        ConnectionError: there is no answer. UserError, DamagedCheckpoint: as the method.
    """
    try:
        return ray.get(getattr(host_actor(node), method).remote(*arguments), timeout=seconds)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except (ray.exceptions.RayError, ValueError) as error:
        raise ConnectionError(f"the host {node:.8} does not answer ({type(error).__name__})") from error


def host_store(node: str) -> HostStore:
    """The folder of a node's host."""
    return HostStore(lambda method, *arguments: call_host(node, method, *arguments))


def host_stores(nodes: Iterable[str]) -> list[Store]:
    """This host's folder, and those of other nodes' hosts."""
    return [FolderStore(checkpoints_directory()), *map(host_store, nodes)]


def place_parcels(options: Mapping[str, Any], parcels: Iterable[Parcel]) -> None:
    """Fetch the parcels that options name to this host. Raises StorageError if no living host has one."""
    digests = set(parcels_of(options))
    for parcel in parcels:
        if parcel.digest in digests:
            try:
                place_parcel(host_stores(living_nodes()), parcel)
            except DamagedCheckpoint as error:
                text = f"The data {parcel.name} are missing on all hosts ({error}): send them again."
                raise StorageError(text) from None


def reset_environment() -> None:
    """Reset the variables that Ray changes for an actor without CPUs, which child processes would inherit, to their
    values in the environment of this process's parent."""
    parent_environment: dict[str, str] = {}
    with suppress(psutil.Error, OSError):
        parent_environment = psutil.Process(os.getppid()).environ()
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        if name in parent_environment:
            os.environ[name] = parent_environment[name]
        else:
            os.environ.pop(name, None)


def remove_old_files(now: float | None = None) -> list[Path]:
    """Remove directories of runs in which no file has changed for a month, and data that no job has asked for since
    then; returns what was removed."""
    oldest = (time.time() if now is None else now) - KEEP_SECONDS
    root = cluster_root()
    runs = [
        path for part in ("units", "checkpoints", "caches") for path in _folders(root / part) if path.name != "sent"
    ]
    runs += _folders(root / "checkpoints" / "sent")
    old = [path for path in runs if _newest(path) < oldest]
    old += [path for path in _folders(sent_directory()) if _mtime(path) < oldest]
    for path in old:
        shutil.rmtree(path, ignore_errors=True)
    return old


def _folders(root: Path) -> Iterator[Path]:
    if root.is_dir():
        yield from (path for path in root.iterdir() if path.is_dir() and not path.is_symlink())


def _newest(path: Path) -> float:
    return max(map(_mtime, [path, *path.rglob("*")]))


def _mtime(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:  # it has just been removed, so it is in use
        return float("inf")


def living_nodes() -> Sequence[str]:
    """Ids of the nodes that Ray considers alive."""
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]
