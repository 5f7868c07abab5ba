"""The actor of a device: trains units on it, and reports to the coordinator."""

from __future__ import annotations

import functools
import os
from typing import Any

from wgpu_lora.cluster.devices.probe import node_devices
from wgpu_lora.cluster.facts import COORDINATOR, Answer, Order, Report, from_plain, to_plain
from wgpu_lora.cluster.node.layout import Layout, cluster_root
from wgpu_lora.cluster.node.options import options_here, parcels_of
from wgpu_lora.cluster.node.parcels import obtain
from wgpu_lora.cluster.node.plainly import plainly
from wgpu_lora.cluster.node.remote import RemoteShelf, call, own_environment
from wgpu_lora.cluster.node.sent import Sent
from wgpu_lora.cluster.node.shelf import Shelf
from wgpu_lora.cluster.node.transfer import ShelfPort, Unreachable
from wgpu_lora.cluster.node.work import Work
from wgpu_lora.cluster.node.works import Works
from wgpu_lora.cluster.parallel.ray_helper import relay_of
from wgpu_lora.cluster.parallel.relay import Relay
from wgpu_lora.errors import UserError

REPORT_SECONDS = 5.0  # that an answer to a report may take


class Device:
    """Runs once per device of a node; its processes die with it. What a person caused is {"refused": sentence}."""

    def __init__(self, node: str, address: str, key: str):
        own_environment()
        self._node, self._address, self._key = node, address, key
        self._layout = Layout(cluster_root())
        self._works = Works(self._work, tell)

    @plainly
    def start(self, order: dict[str, Any]) -> dict[str, Any]:
        """Take an Order. Its process starts once the coordinator has answered the first report."""
        try:
            self._works.start(from_plain(Order, order))
        except ValueError as error:
            raise UserError(f"The order is not valid ({error}): use the same version on all machines.") from None
        return {}

    @plainly
    def stop(self, unit: str) -> dict[str, Any]:
        """End a unit's process at once, without a last copy; nothing more is reported of it."""
        self._works.stop(unit)
        return {}

    def work(self) -> list[dict[str, Any]]:
        """The units that this device has, with their epochs."""
        return [{"unit": unit, "epoch": epoch} for unit, epoch in self._works.units().items()]

    def pid(self) -> int:
        """The number of this process."""
        return os.getpid()

    # -- for its works ---------------------------------------------------------------------------------------------

    def _work(self, order: Order) -> Work:
        def options(given: dict[str, Any]) -> dict[str, Any]:
            return self._options(order, given)

        return Work(order, self._layout, self._node, self._shelf, self._index, options, self._parallel)

    @staticmethod
    def _parallel(order: Order) -> Relay:
        return relay_of(order, functools.partial(options_of_host, order))

    def _shelf(self, node: str) -> ShelfPort:
        return Shelf(self._layout) if node in ("", self._node) else RemoteShelf(node)

    def _index(self) -> int | None:
        return next((found.index for found in node_devices(self._address) if found.key == self._key), None)

    def _options(self, order: Order, options: dict[str, Any]) -> dict[str, Any]:
        return options_of(options, order, self._layout)


def options_of(options: dict[str, Any], order: Order, layout: Layout) -> dict[str, Any]:
    """A task's options with the paths of this host, which gets the data that it lacks: a teacher's cache, or what a
    driver has sent before this host came.

    Raises:
        UserError: a path is not allowed here, or data are nowhere. Unreachable: they are on a host that is away.
    """
    shelf = [order.shelf] if order.shelf else []
    for digest in parcels_of(options):
        obtain(Sent(layout.sent), digest, order.parcels.get(digest) or shelf)
    return options_here(options, layout)


def options_of_host(order: Order, options: dict[str, Any]) -> dict[str, Any]:
    """A task's options with the paths of the host that calls it, for a helper there. Raises UserError."""
    own_environment()
    try:
        return options_of(options, order, Layout(cluster_root()))
    except Unreachable as error:
        raise UserError(f"What the helper needs is on a host that is away: {error}") from None


def tell(report: Report) -> Answer | None:
    """Send a report to the coordinator; None if it does not answer."""
    try:
        return from_plain(Answer, call(COORDINATOR, "report", to_plain(report), seconds=REPORT_SECONDS))
    except (Unreachable, UserError, ValueError):
        return None
