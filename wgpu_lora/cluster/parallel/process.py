"""A helper's process on this machine, the job `gradients`, and questions to it. Without Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from wgpu_lora.cluster.parallel.line import LOOK, Line
from wgpu_lora.worker.worker import Worker

HUNG = 900.0  # seconds without an answer after which a process is ended; far more than a part takes, compiled first
REFUSALS = ("UserError", "NotFiniteError")  # errors that the next process would have, too; not a lack of memory
# Options that only the leader has.
LEADERS = ("output", "resume", "overwrite", "requests", "save_steps", "save_minutes", "report_to", "run_log")


class Lost(Exception):
    """A helper is not there, for this reason, a sentence; another one may be started."""


class Refused(Lost):
    """A helper cannot take part, and another one in its place could not either."""


class _Process:
    """A worker that helps with a run, and the line to it."""

    def __init__(self, options: Mapping[str, Any], device: int | str | None):
        self._line = Line()
        self._link: Connection | None = None
        self._ended = threading.Event()
        self._worker = Worker("gradients", {**options, "device": device, "link": self._line.address})

    def ready(self) -> bytes:
        self._link = self._line.call(self._going)
        return self._heard()

    def ask(self, question: bytes) -> bytes:
        with suppress(OSError, ValueError):  # then nothing is heard either
            if self._link:
                self._link.send_bytes(question)
        return self._heard(HUNG)

    def _heard(self, seconds: float | None = None) -> bytes:
        end = None if seconds is None else time.monotonic() + seconds
        with suppress(EOFError, OSError):
            while self._link and self._going():
                if self._link.poll(LOOK):
                    return self._link.recv_bytes()
                if end is not None and time.monotonic() > end:
                    self.end()
                    raise Lost(f"A helper of a data-parallel adapter did not answer for {seconds:g} s.")
        if self._ended.is_set():
            raise Lost("The helper was ended.")
        self._worker.wait()
        said = f"A helper of a data-parallel adapter ended: {self._worker.failure_reason()}"
        raise (Refused if self._worker.last.get("kind") in REFUSALS else Lost)(said)

    def _going(self) -> bool:
        return self._worker.running() and not self._ended.is_set()

    def end(self) -> None:
        self._ended.set()
        self._worker.end()
        if self._link:
            self._link.close()
        self._line.close()
        self._worker.close()


class LocalHelper:
    """A helper on this machine.

    Args:
        options: of the leader's task, with the paths of this machine.
        device: finds the index of the device; None if it is not there.
    """

    def __init__(self, options: Mapping[str, Any], device: Callable[[], int | None]):
        self._options = {name: value for name, value in options.items() if name not in LEADERS and value is not None}
        self._device = device
        self._process: _Process | None = None
        self._over = False
        self._lock = threading.Lock()

    def ready(self) -> bytes:
        """Start its process and wait until it can be asked; returns what it says then.

        Raises:
            Lost: it ended. Refused: for a reason that another process would have, too.
        """
        index = self._device()
        if index is None:
            raise Lost("The device of a helper is not there.")
        with self._lock:
            self._stop()
            if self._over:
                raise Lost("The helper was ended.")
            self._process = process = _Process(self._options, index)
        return process.ready()

    def ask(self, question: bytes) -> bytes:
        """The answer to a leader's question. Raises as `ready`."""
        process = self._process
        if not process:
            raise Lost("The helper was ended.")
        return process.ask(question)

    def end(self) -> None:
        """End its process at once, for good."""
        with self._lock:
            self._over = True
            self._stop()

    def _stop(self) -> None:
        if self._process:
            self._process.end()
        self._process = None
