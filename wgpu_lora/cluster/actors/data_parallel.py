"""One adapter on several devices: the replicas of a training actor are actors that compute parts of its steps."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import ray

from wgpu_lora.cluster.actors.host_actor import place_parcels, reset_environment
from wgpu_lora.cluster.cluster_paths import options_here
from wgpu_lora.cluster.device_resources import device_index
from wgpu_lora.cluster.messages import NAMESPACE, Parcel
from wgpu_lora.data import split_python_rows
from wgpu_lora.errors import UserError
from wgpu_lora.train.chain.chain_run import code_digest
from wgpu_lora.train.data_parallel.leader import DataParallelLeader
from wgpu_lora.train.replica import prepare_worker, serve_gradients
from wgpu_lora.train.resolve_options import resolve_options


class ReplicaActor:
    """Holds a device and computes parts of the steps of a run. Ray starts it again if it dies.

    Args:
        key: of the device. options: of the run, as its training actor has them. parcels: files that they name.
    """

    def __init__(self, key: str, options: dict[str, Any], parcels: Sequence[Parcel]):
        reset_environment()
        self._key, self._options, self._parcels = key, options, parcels
        self._lock, self._stack = threading.Lock(), ExitStack()
        self._worker: Any = None

    def ready(self) -> None:
        """Returns once the model is loaded. Raises UserError if it cannot be, for now."""
        with self._lock:
            if self._worker is None:
                self._worker = self._load()

    def _load(self) -> Any:
        index = device_index(self._key)
        if index is None:
            raise UserError(f"There is no device {self._key} on this host any more: see 'wgpu-lora cluster status'.")
        place_parcels(self._options, self._parcels)
        options = {name: value for name, value in options_here(self._options).items() if value is not None}
        texts, rows = split_python_rows({**options, "device": index})
        args, _ = resolve_options(texts, None, "a replica")
        return self._stack.enter_context(serve_gradients(prepare_worker(args, rows=rows), code=code_digest()))

    def compute(self, question: bytes) -> bytes:
        """The gradients and totals of a part of a step, see `DataParallelWorker.answer`."""
        answer: bytes = self._worker.answer(question)
        return answer


class _ActorLink:
    def __init__(self, name: str):
        self._name = name

    def ready(self) -> Future[Any]:
        return self._future("ready")

    def compute(self, question: bytes) -> Future[bytes]:
        return self._future("compute", question)

    def _future(self, method: str, *arguments: Any) -> Future[Any]:
        try:
            actor = ray.get_actor(self._name, namespace=NAMESPACE)
            future: Future[Any] = getattr(actor, method).remote(*arguments).future()
        except ValueError as error:  # there is no such actor, for now
            future = Future()
            future.set_exception(ConnectionError(str(error)))
        return future


def leader_of(replicas: Sequence[str]) -> DataParallelLeader:
    """A leader that divides steps among the actors of these names."""
    return DataParallelLeader([_ActorLink(name) for name in replicas], code_digest())
