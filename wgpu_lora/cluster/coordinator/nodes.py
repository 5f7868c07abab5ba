"""The coordinator's way to the actors of nodes: their handles, and calls with a bounded wait. Imports Ray."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import ray
import ray.exceptions

from wgpu_lora.cluster.facts import Order, to_plain
from wgpu_lora.cluster.node import start
from wgpu_lora.cluster.node.plainly import accepted

CALL_SECONDS = 30.0
RENAMED_SECONDS = 5  # that Ray may take to give an actor's name to another
GONE = (ray.exceptions.RayError, LookupError, ConnectionError, TimeoutError, asyncio.TimeoutError, ValueError)


class Away(Exception):
    """A node's actor does not answer."""


class Nodes:
    """Host and device actors, made where they are missing. Calls of Ray that may wait run on other threads."""

    def __init__(self) -> None:
        self._hosts: dict[str, Any] = {}
        self._devices: dict[tuple[str, str], Any] = {}

    async def living(self) -> list[str]:
        """Ids of the nodes that Ray takes for alive."""
        return [node["NodeID"] for node in await asyncio.to_thread(ray.nodes) if node["Alive"]]

    async def ask(self, node: str, method: str, *arguments: Any, seconds: float = CALL_SECONDS) -> Any:
        """Call a method of a node's host.

        Raises:
            Away: there is no answer. Fenced or UserError: it refuses.
        """
        made = functools.partial(start.host, node)
        try:
            return accepted(await _answer(self._hosts, node, made, method, arguments, seconds))
        except GONE as error:
            raise Away(f"host {node:.8} does not answer ({type(error).__name__})") from error

    async def order(self, node: str, key: str, order: Order) -> None:
        """Give an order to a device.

        Raises:
            Away: it is not known whether it has arrived. UserError: the device refuses it.
        """
        made = functools.partial(start.device, node, key)
        try:
            accepted(await _answer(self._devices, (node, key), made, "start", (to_plain(order),), CALL_SECONDS))
        except GONE as error:
            raise Away(f"the device's actor does not answer ({type(error).__name__})") from error

    async def retire(self) -> None:
        """End all actors of nodes, also those of an earlier coordinator, so that no memory or resource is held."""
        self._hosts, self._devices = {}, {}
        await asyncio.to_thread(start.end_all)


async def _answer(
    handles: dict[Any, Any],
    name: Any,
    made: Callable[[], Any],
    method: str,
    arguments: tuple[Any, ...],
    seconds: float,
) -> Any:
    """Call a method that may be called twice. An actor that has died is made anew, once Ray has forgotten its name."""
    tries = RENAMED_SECONDS
    while True:
        try:
            if name not in handles:
                handles[name] = await asyncio.to_thread(made)
            reference = getattr(handles[name], method).remote(*arguments)
            return await asyncio.wait_for(asyncio.wrap_future(reference.future()), seconds)
        except GONE as error:
            handles.pop(name, None)
            tries -= 1
            if not tries or not isinstance(error, ray.exceptions.RayActorError):
                raise
        await asyncio.sleep(1.0)
