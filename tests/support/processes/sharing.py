"""Data-parallel runs within one process: replicas with a device of their own, and replicas that fail on purpose."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.train.data_parallel.leader import DataParallelLeader
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.replica import prepare_worker, serve_gradients

Reply = Callable[[bytes], bytes]


class LocalLink:
    """A link whose other side is a function, called at once, by one thread at a time as replicas share a device."""

    lock = threading.Lock()

    def __init__(self, reply: Reply):
        self._reply = reply
        self.questions = 0
        self.refusal = ""

    def ready(self) -> Future[Any]:
        future = Future[Any]()
        future.set_result(None)
        return future

    def compute(self, question: bytes) -> Future[bytes]:
        self.questions += 1
        future = Future[bytes]()
        try:
            with self.lock:
                future.set_result(self._reply(question))
        except (UserError, ConnectionError) as error:
            self.refusal = str(error)
            future.set_exception(error)
        return future


@contextmanager
def replicas(
    args: TrainingArguments,
    count: int,
    device: Device,
    wrap: Callable[[int, Reply], Reply] = lambda number, reply: reply,
) -> Iterator[tuple[DataParallelLeader, Sequence[LocalLink]]]:
    """Replicas of a run with these options, on a device of their own. wrap: changes what replica `number` answers."""
    with ExitStack() as stack:
        links = []
        for number in range(1, count + 1):
            model = open_model(str(args.model), device, args.base_dtype)
            job = prepare_worker(replace(args, output="unused", resume=False), model)
            links.append(LocalLink(wrap(number, stack.enter_context(serve_gradients(job)).answer)))
        yield DataParallelLeader(links), links
