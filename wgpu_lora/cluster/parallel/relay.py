"""The leader's side of a data-parallel unit: passes its process's questions to helpers, which come and go. Without Ray.

A helper that is lost is started again, after a while that grows with each time. Its leader's process computes what is
missing meanwhile, so that nothing waits.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Protocol

from wgpu_lora.cluster.parallel.line import LOOK, Line
from wgpu_lora.cluster.parallel.process import Lost, Refused
from wgpu_lora.train.data_parallel.gradient_messages import LOST, message

AGAIN, MOST = 5.0, 300.0  # seconds before a helper is started again, at first and at most


class Remote(Protocol):
    """A helper, on this machine or on another one. Its methods block and raise Lost or Refused."""

    def ready(self) -> bytes:
        """Start it, again if it was lost; what it says when it can be asked."""

    def ask(self, question: bytes) -> bytes: ...

    def end(self) -> None:
        """End it at once, from another thread, too."""


class Relay:
    """The lines of a leader's process to its helpers, members 1, 2, ...; a context that ends them.

    Attributes:
        links: the addresses, for the option `helpers` of the job `finetune`.
    """

    def __init__(self, helpers: Sequence[Remote], again: float = AGAIN):
        self._helpers, self._again = helpers, again
        self._lines = [Line() for _ in helpers]
        self.links = [line.address for line in self._lines]
        self._over = threading.Event()
        self._problems: dict[int, str] = {}
        self._threads = [
            threading.Thread(target=self._serve, args=(number, *both), daemon=True, name=f"helper {number}")
            for number, both in enumerate(zip(self._lines, helpers, strict=True), 1)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def problem(self) -> str:
        """Why helpers are missing, in sentences; '' if none are."""
        return " ".join(dict.fromkeys(self._problems.values()))

    def _serve(self, number: int, line: Line, helper: Remote) -> None:
        leader = line.call(lambda: not self._over.is_set())
        if not leader:
            return
        wait = self._again
        with leader, suppress(EOFError, OSError):  # it has ended
            while not self._over.is_set():
                try:
                    here = helper.ready()
                    self._problems.pop(number, None)
                    leader.send_bytes(here)
                    while True:
                        leader.send_bytes(helper.ask(self._heard(leader)))
                        wait = self._again  # not before: one may be lost at its first part each time
                except Lost as error:
                    self._problems[number] = str(error)
                    if isinstance(error, Refused):
                        return
                    leader.send_bytes(message({"say": LOST}))
                self._over.wait(wait)
                wait = min(2 * wait, MOST)

    def _heard(self, leader: Connection) -> bytes:
        while not leader.poll(LOOK):
            if self._over.is_set():
                raise EOFError
        return leader.recv_bytes()

    def close(self) -> None:
        """End the helpers and hang up."""
        self._over.set()
        for helper in self._helpers:
            with suppress(Exception):  # whatever it is, the others are to be ended, too
                helper.end()
        for line in self._lines:
            line.close()
        for thread in self._threads:
            thread.join(10.0)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
