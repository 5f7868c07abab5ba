"""Another host's shelf and data, through its actor: methods of Ray's actors with a bounded wait."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import psutil
import ray
import ray.exceptions

from wgpu_lora.cluster.facts import NAMESPACE, Copy, from_plain, to_plain
from wgpu_lora.cluster.node.listing import FileFacts, Listing, checked_listing, plain_listing
from wgpu_lora.cluster.node.plainly import accepted
from wgpu_lora.cluster.node.shelf import PIECE
from wgpu_lora.cluster.node.transfer import Unreachable

SECONDS = 30.0  # that a call may take
GONE = (ray.exceptions.RayError, ConnectionError, TimeoutError, ValueError, RuntimeError)


def host_name(node: str) -> str:
    """The name of the actor of a node's host."""
    return f"host:{node}"


def call(name: str, method: str, *arguments: Any, seconds: float = SECONDS) -> Any:
    """Call a method of a named actor.

    Raises:
        Unreachable: there is no such actor, or no answer. Fenced or UserError: it refuses.
    """
    try:
        actor = ray.get_actor(name, namespace=NAMESPACE)
        answer = ray.get(getattr(actor, method).remote(*arguments), timeout=seconds)
    except GONE as error:
        raise Unreachable(f"{name} does not answer ({type(error).__name__}).") from error
    return accepted(answer)


def own_environment() -> None:
    """Undo what Ray sets for an actor without processors, and its worker processes would inherit: they get what the
    person who started Ray has set, who is known to this process's parent."""
    given: dict[str, str] = {}
    with suppress(psutil.Error, OSError):
        given = psutil.Process(os.getppid()).environ()
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        if name in given:
            os.environ[name] = given[name]
        else:
            os.environ.pop(name, None)


class RemoteShelf:
    """The shelf of a node's host, as transfers use it."""

    def __init__(self, node: str):
        self._name = host_name(node)

    def begin(self, unit: str, epoch: int, files: Listing) -> dict[str, int]:
        found: dict[str, int] = call(self._name, "begin_copy", unit, epoch, plain_listing(files))
        return found

    def put(self, unit: str, epoch: int, file: FileFacts, offset: int, data: bytes) -> None:
        call(self._name, "put", unit, epoch, to_plain(file), offset, data)

    def commit(self, copy: Copy, files: Listing) -> Copy:
        return from_plain(Copy, call(self._name, "commit_copy", to_plain(copy), plain_listing(files)))

    def files(self, unit: str, digest: str) -> list[FileFacts]:
        return checked_listing(call(self._name, "files", unit, digest))

    def read(self, unit: str, digest: str, path: str, offset: int, size: int = PIECE) -> bytes:
        found: bytes = call(self._name, "read", unit, digest, path, offset, size)
        return found
