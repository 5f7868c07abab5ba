"""The actor of a host: what it has, plans of tasks, its shelf, and data that drivers send."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import asdict
from typing import Any

from wgpu_lora.cluster.devices.listing import devices_here
from wgpu_lora.cluster.devices.probe import node_devices
from wgpu_lora.cluster.devices.speed import measured
from wgpu_lora.cluster.devices.versions import own_versions
from wgpu_lora.cluster.facts import Copy, NodeFacts, Task, Versions, from_plain, to_plain
from wgpu_lora.cluster.node.layout import Layout, cluster_root
from wgpu_lora.cluster.node.listing import checked_listing, plain_listing, results_of
from wgpu_lora.cluster.node.options import options_here
from wgpu_lora.cluster.node.plainly import plainly
from wgpu_lora.cluster.node.publishing import allowed_roots, publish, refused_path, unreadable
from wgpu_lora.cluster.node.remote import own_environment
from wgpu_lora.cluster.node.sent import Sent
from wgpu_lora.cluster.node.shelf import PIECE, Shelf
from wgpu_lora.cluster.node.tidying import tidy
from wgpu_lora.cluster.spec.outputs import check_outputs
from wgpu_lora.cluster.spec.paths import SENT, node_paths, on_node
from wgpu_lora.cluster.spec.sending import Parcel
from wgpu_lora.errors import UserError
from wgpu_lora.worker.worker import Worker, WorkerFailed

PLAN_SECONDS = 600.0  # that the plans of a request may take


class Host:
    """Runs once per node. JSON values and bytes pass; what a person caused is {"refused": sentence}."""

    def __init__(self, node: str, address: str):
        own_environment()
        self._node, self._address = node, address
        self._layout = Layout(cluster_root())
        self._shelf, self._sent = Shelf(self._layout), Sent(self._layout.sent)
        self._versions: Versions | None = None
        threading.Thread(target=tidy, args=(self._layout,), daemon=True).start()

    # -- what is here ----------------------------------------------------------------------------------------------

    @plainly
    def survey(self) -> dict[str, Any]:
        """The node's NodeFacts: its versions, and its devices with their leases and free memory."""
        self._versions = self._versions or own_versions()
        devices = node_devices(self._address)
        return to_plain(NodeFacts(self._node, self._address, socket.gethostname(), self._versions, devices))

    @plainly
    def measure(self, key: str) -> dict[str, Any]:
        """The speed of a device, as `devices.speed.measured` finds it."""
        return asdict(measured(devices_here()[self._index(key)]))

    def _index(self, key: str) -> int:
        for device in node_devices(self._address):
            if device.key == key:
                return int(device.index)
        raise UserError(f"There is no device {key} on {self._address} any more: look at wgpu-lora cluster status.")

    @plainly
    def plan(
        self,
        tasks: list[dict[str, Any]],
        index: int,
        joined: list[list[str]] | None = None,
        shared: bool = False,
        cached: bool = False,
    ) -> dict[str, Any]:
        """Plans of tasks, {"name", "options"}, on the device with this index, as the worker's job `plan` makes them.

        shared: each of them is trained by several devices together. cached: also without their teachers.
        """
        there = [{"name": task["name"], "options": self._options(task["options"])} for task in tasks]
        options = {"tasks": there, "device": index, "shared": shared, "cached": cached} | (
            {"joined": joined} if joined else {}
        )
        try:
            with Worker("plan", options, timeout=PLAN_SECONDS) as worker:
                found: dict[str, Any] = worker.result()
                return found
        except WorkerFailed as error:
            raise UserError(f"The tasks could not be planned on {self._address}: {error}") from None

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        return options_here(options, self._layout)

    @plainly
    def check_paths(self, paths: list[str]) -> dict[str, str]:
        """Those of these paths of tasks' options that cannot be read here, each with why, as part of a sentence."""
        there = {path: self._here(path) for path in paths}
        found = {path: unreadable(here, self._roots(path)) for path, here in there.items()}
        return {path: wrong for path, wrong in found.items() if wrong}

    @plainly
    def check_outputs(self, tasks: list[dict[str, Any]]) -> None:
        """Refuses tasks whose output directories, in a shared folder, are in use, another's, or not allowed here."""
        found = [from_plain(Task, task) for task in tasks]
        for task in found:
            if wrong := refused_path(task.output, allowed_roots()):
                raise UserError(f"The output directory {task.output} of {task.name} {wrong}: choose another.")
        check_outputs(found)

    def _here(self, path: str) -> str:
        return str(on_node({"data": path}, node_paths(), self._layout.sent)["data"])

    def _roots(self, path: str) -> list[Any]:
        return [] if path.startswith(SENT) else allowed_roots()

    # -- the shelf -------------------------------------------------------------------------------------------------

    @plainly
    def held(self, unit: str) -> dict[str, Any] | None:
        """The newest copy of a unit, a Copy; None if there is none."""
        copy = self._shelf.held(unit)
        return to_plain(copy) if copy else None

    @plainly
    def fence(self, unit: str, epoch: int) -> int:
        """Refuse copies of older epochs from now on; returns the oldest epoch that may write."""
        return self._shelf.fence(unit, epoch)

    @plainly
    def begin_copy(self, unit: str, epoch: int, files: list[Any]) -> dict[str, int]:
        """Announce a copy; returns the missing digests, with the bytes of each that are here already."""
        return self._shelf.begin(unit, epoch, checked_listing(files))

    @plainly
    def put(self, unit: str, epoch: int, file: dict[str, Any], offset: int, data: bytes) -> None:
        """Append a piece of a file of an announced copy."""
        (facts,) = checked_listing([file])
        self._shelf.put(unit, epoch, facts, offset, data)

    @plainly
    def commit_copy(self, copy: dict[str, Any], files: list[Any]) -> dict[str, Any]:
        """Make an announced copy, all of whose files are here, the unit's newest."""
        return to_plain(self._shelf.commit(from_plain(Copy, copy), checked_listing(files)))

    @plainly
    def files(self, unit: str, digest: str) -> list[dict[str, Any]]:
        """The files of a copy: path, digest and size."""
        return plain_listing(self._shelf.files(unit, digest))

    @plainly
    def results(self, unit: str, digest: str, task: str) -> list[dict[str, Any]]:
        """The files of a task's result, by their paths in its directory; `read` takes `adapters/<task>/<path>`."""
        return plain_listing(results_of(self._shelf.files(unit, digest), task))

    @plainly
    def read(self, unit: str, digest: str, path: str, offset: int, size: int = PIECE) -> bytes:
        """A piece of a file of a copy, at most 4 MB; empty at its end."""
        return self._shelf.read(unit, digest, path, offset, size)

    @plainly
    def publish(self, unit: str, digest: str, task: str, target: str, shared: str = "/") -> list[dict[str, Any]]:
        """Write a task's result to a directory of this host; returns its files. The second time changes nothing."""
        return plain_listing(publish(self._shelf, unit, digest, task, target, shared))

    @plainly
    def forget(self, run: str, parcels: list[str] | None = None) -> None:
        """Remove everything of a run from this host, also these parcels, the run's teacher caches."""
        self._shelf.forget(run)
        for digest in parcels or ():
            self._sent.remove(digest)

    # -- data of drivers -------------------------------------------------------------------------------------------

    @plainly
    def sent(self, digest: str) -> bool:
        """Whether a parcel is here."""
        return self._sent.has(digest)

    @plainly
    def begin_sent(self, parcel: dict[str, Any]) -> dict[str, int]:
        """Announce a parcel; returns the missing digests, with the bytes of each that are here already."""
        return self._sent.begin(_parcel(parcel))

    @plainly
    def put_sent(self, parcel: str, digest: str, offset: int, data: bytes) -> None:
        """Append a piece of a parcel's file."""
        self._sent.put(parcel, digest, offset, data)

    @plainly
    def commit_sent(self, parcel: dict[str, Any]) -> str:
        """Give a parcel, all of whose files are here, its place; returns the path."""
        return str(self._sent.commit(_parcel(parcel)))

    @plainly
    def parcel(self, digest: str) -> dict[str, Any]:
        """What a parcel consists of, for a host that lacks it."""
        return to_plain(self._sent.parcel(digest))

    @plainly
    def read_sent(self, digest: str, path: str, offset: int) -> bytes:
        """A piece of a parcel's file."""
        return self._sent.read(digest, path, offset)

    def pid(self) -> int:
        """The number of this process."""
        return os.getpid()


def _parcel(value: Any) -> Parcel:
    try:
        return from_plain(Parcel, value)
    except ValueError as error:
        raise UserError(f"The sent data are not valid ({error}): use the same version on all machines.") from None
