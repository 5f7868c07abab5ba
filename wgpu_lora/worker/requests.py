"""What a parent asks of a job that trains, by `Port.listen`."""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Collection
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.train.requests import Requests
from wgpu_lora.words import listed


class Asked(Requests):
    """The requests `stop` and `end`. names: of a pipeline's adapters; None for a single run, which has no name."""

    def __init__(self, names: Collection[str] | None = None):
        super().__init__()
        self._names = names

    def side(self) -> _Side:
        """The functions that answer, for `Port.listen`."""
        return _Side(self, self._names)


class _Side:
    def __init__(self, requests: Requests, names: Collection[str] | None):
        self._requests, self._names = requests, names

    def stop(self) -> dict[str, Any]:
        """Interrupt the job, as SIGTERM does: it saves a checkpoint, and can be resumed."""
        if hasattr(signal, "pthread_kill"):  # also wakes a main thread that waits for memory
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        else:
            _thread.interrupt_main(signal.SIGTERM)
        return {"request": "stop"}

    def end(self, adapter: str | None = None) -> dict[str, Any]:
        """End an adapter after the current step, with its results."""
        if self._names is not None and adapter not in self._names:
            raise UserError(f"There is no adapter {adapter!r:.60} to end: choose one of {listed([*self._names])}.")
        self._requests.end(None if self._names is None else adapter)
        return {"request": "end", "adapter": adapter}
