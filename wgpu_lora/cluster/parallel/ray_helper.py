"""Helpers on other nodes: an actor on each, made by the leader's and ended by Ray with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from wgpu_lora.cluster.devices.probe import node_devices
from wgpu_lora.cluster.facts import Order
from wgpu_lora.cluster.parallel.process import LocalHelper, Lost, Refused
from wgpu_lora.cluster.parallel.relay import Relay
from wgpu_lora.errors import UserError

LOOK = 1.0  # seconds between looks at whether the helper was ended meanwhile
ERRORS = {"lost": Lost, "refused": Refused}


Here = Callable[[dict[str, Any]], dict[str, Any]]  # turns a task's options into those of the host that calls it


def relay_of(order: Order, here: Here) -> Relay:
    """The lines to the helpers of a data-parallel order, which are started on their nodes.

    here: a function of a module, which is called on the helpers' hosts; may raise UserError.
    """
    (task,) = order.tasks
    return Relay([RayHelper(device, task.options, here) for device in order.helpers])


class HelperActor:
    """Runs a helper's process on its node. Errors are {"lost": sentence} or {"refused": sentence}."""

    def __init__(self, address: str, key: str, options: dict[str, Any], here: Here):
        self._address, self._key, self._options, self._here = address, key, options, here
        self._helper: LocalHelper | None = None

    def ready(self) -> bytes | dict[str, str]:
        try:
            if not self._helper:
                self._helper = LocalHelper(self._here(self._options), self._index)
            return self._helper.ready()
        except (Lost, UserError) as error:
            return _plain(error)

    def ask(self, question: bytes) -> bytes | dict[str, str]:
        try:
            if not self._helper:
                raise Lost("The helper was not started.")
            return self._helper.ask(question)
        except Lost as error:
            return _plain(error)

    def end(self) -> None:
        if self._helper:
            self._helper.end()

    def _index(self) -> int | None:
        return next((found.index for found in node_devices(self._address) if found.key == self._key), None)


def _plain(error: Exception) -> dict[str, str]:
    return {"lost" if isinstance(error, Lost) and not isinstance(error, Refused) else "refused": str(error)}


class RayHelper:
    """A helper on the device with this id, as a Relay uses it."""

    def __init__(self, device: str, options: Mapping[str, Any], here: Here):
        self._address, _, self._key = device.partition("/")
        self._options, self._here = dict(options), here
        self._actor: Any = None
        self._over = threading.Event()
        self._lock = threading.Lock()

    def ready(self) -> bytes:
        """Start it on its node, as that is now."""
        with self._lock:  # none is made after the end
            if self._over.is_set():
                raise Lost("The helper was ended.")
            if self._actor is None:
                self._actor = self._made()
        return self._answer("ready")

    def ask(self, question: bytes) -> bytes:
        return self._answer("ask", question)

    def end(self) -> None:
        """End its process, and the actor, which would else live as long as its maker."""
        self._over.set()
        with self._lock:
            actor, self._actor = self._actor, None
        if actor is not None:
            with suppress(ray.exceptions.RayError, TimeoutError):  # else it ends once nobody is connected to it
                ray.get(actor.end.remote(), timeout=10.0)
            ray.kill(actor)

    def _made(self) -> Any:
        try:
            nodes = ray.nodes()
        except (ray.exceptions.RayError, ConnectionError) as error:
            raise Lost(f"Ray cannot be asked for the node {self._address} ({type(error).__name__}).") from None
        for node in nodes:
            if node["Alive"] and node["NodeManagerAddress"] == self._address:
                placed = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                made = ray.remote(HelperActor).options(num_cpus=0, max_concurrency=2, scheduling_strategy=placed)
                return made.remote(self._address, self._key, self._options, self._here)
        raise Lost(f"The node {self._address} of a helper is not there.")

    def _answer(self, method: str, *arguments: Any) -> bytes:
        try:
            asked = getattr(self._actor, method).remote(*arguments)
            while not ray.wait([asked], timeout=LOOK)[0]:
                if self._over.is_set():
                    raise Lost("The helper was ended.")
            found = ray.get(asked)
        except (ray.exceptions.RayError, AttributeError, ConnectionError) as error:
            self._actor = None
            raise Lost(f"The helper on {self._address} was lost ({type(error).__name__}).") from None
        if isinstance(found, dict):
            kind, said = next(iter(found.items()))
            raise ERRORS.get(kind, Lost)(f"{self._address}: {said}")
        answer: bytes = found
        return answer
