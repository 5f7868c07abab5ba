"""A replica of a data-parallel run, as its leader sees it: asked for parts of steps, and waited for within bounds."""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

from wgpu_lora.processes.signals import check_stop
from wgpu_lora.train.data_parallel.gradient_messages import Arrays, read_message

RETRY_SECONDS = 5.0  # before a replica that was lost is tried again
TICK = 0.1  # seconds


class Link(Protocol):
    """A way to a replica."""

    def ready(self) -> Future[Any]:
        """Done once the replica has loaded its model; fails if it cannot."""

    def compute(self, question: bytes) -> Future[bytes]:
        """The answer to a question; fails if the replica is lost."""


@dataclass(frozen=True)
class Answer:
    """The gradients and totals of a part, and the seconds from the question to them."""

    arrays: Arrays
    seconds: float


class RemoteWorker:
    """A replica at the other end of a link.

    Attributes:
        tokens: of the part that it was last asked for. late: the last answer to a part that the leader had computed
            itself by then. new: it has come since it was last asked, so that it does not know the run yet.
        problem: why it was lost, or is waited for; empty once it is ready.
    """

    def __init__(self, link: Link):
        self._link, self._ready = link, link.ready()
        self._retry_time: float | None = None  # when it is tried again
        self._answer: Future[bytes] | None = None
        self._begin = 0.0
        self.tokens, self.new = 0, True
        self.late: Answer | None = None
        self.problem = ""

    def ready(self) -> bool:
        """Whether it may be asked: it is there, and has answered everything."""
        if self._answer is not None and self._answer.done():
            self.late = self._take()
        if self._retry_time is not None and time.monotonic() >= self._retry_time:
            self._ready, self._retry_time, self.new = self._link.ready(), None, True
        if self._retry_time is None and self._ready.done() and (error := self._ready.exception()):
            self._lose(error)
        if self._retry_time is not None or not self._ready.done() or self._answer is not None:
            return False
        self.problem = ""
        return True

    def ask(self, question: bytes, tokens: int) -> None:
        """Ask a replica that is ready for a part of so many tokens; returns at once."""
        self.new, self.tokens, self._begin = False, tokens, time.monotonic()
        self._answer = self._link.compute(question)

    def answer(self, seconds: float) -> Answer | None:
        """The answer to the only open question; None if it is late, or the replica was lost."""
        assert self._answer is not None
        end = time.monotonic() + seconds
        while not self._answer.done() and time.monotonic() < end:
            check_stop()
            wait([self._answer], min(TICK, max(0.0, end - time.monotonic())))
        if not self._answer.done():
            self.problem = "it has not answered in time, and its part was computed by the leader"
            return None
        return self._take()

    def _take(self) -> Answer | None:
        answer, self._answer = self._answer, None
        assert answer is not None
        try:
            return Answer(read_message(answer.result())[1], time.monotonic() - self._begin)
        except Exception as error:  # of whatever carries messages, and ValueError: it is not a message
            self._lose(error)
            return None

    def _lose(self, error: BaseException) -> None:
        self.problem, self._retry_time = str(error), time.monotonic() + RETRY_SECONDS
