"""Data-parallel runs within one process: helpers with devices of their own, and helpers that fail on purpose."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from wgpu_lora.worker.kinds.gradients import prepare_worker, serve_gradients

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.train.data_parallel import gradient_messages
from wgpu_lora.train.data_parallel.gradient_messages import message
from wgpu_lora.train.data_parallel.leader import DataParallelLeader
from wgpu_lora.train.options.training_arguments import TrainingArguments

Reply = Callable[[bytes], bytes]


class LocalLink:
    """A link whose other side is a function, called by the thread that asks, one at a time as they share a device."""

    lock = threading.Lock()

    def __init__(self, reply: Reply):
        self._reply = reply
        self._said: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._said.put(message({"say": "ready"}))
        self.asked = 0
        self.refused = ""

    def send_bytes(self, data: bytes) -> None:
        self.asked += 1
        try:
            with self.lock:
                answer = self._reply(data)
        except UserError as error:
            self.refused = str(error)
            raise EOFError from None
        self._said.put(answer)
        if gradient_messages.read_message(answer)[0].get("say") == gradient_messages.LOST:
            self._said.put(message({"say": "ready"}))  # it comes back

    def recv_bytes(self) -> bytes:
        return self._said.get()

    def close(self) -> None:
        """Nothing is open."""


def come(sharing: DataParallelLeader, count: int) -> None:
    """Wait until so many helpers are there, so that they take part from the first step on."""
    end = time.monotonic() + 60
    while len(sharing.ready()) < count:
        assert time.monotonic() < end, "a helper has not come"
        time.sleep(0.001)


@contextmanager
def helped(
    args: TrainingArguments,
    count: int,
    device: Device,
    wrap: Callable[[int, Reply], Reply] = lambda number, reply: reply,
) -> Iterator[tuple[DataParallelLeader, Sequence[LocalLink]]]:
    """Helpers of a run with these options, on a device of their own. wrap: changes what helper `number` answers."""
    with ExitStack() as stack:
        links = []
        for number in range(1, count + 1):
            model = open_model(str(args.model), device, args.base_dtype)
            job = prepare_worker(replace(args, output="unused", resume=False), model)
            links.append(LocalLink(wrap(number, stack.enter_context(serve_gradients(job)).answer)))
        sharing = DataParallelLeader(links)
        stack.callback(sharing.close)
        come(sharing, count)
        yield sharing, links
