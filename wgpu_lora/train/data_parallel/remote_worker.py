"""A helper of a data-parallel run, as its leader sees it: asked for parts of steps, and waited for within bounds."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol

from wgpu_lora.train.data_parallel.gradient_messages import LOST, Arrays, read_message


class Link(Protocol):
    """A connection that passes whole messages; those of multiprocessing.connection are."""

    def send_bytes(self, data: bytes, /) -> None: ...

    def recv_bytes(self) -> bytes:
        """Blocks; raises EOFError once the other side has closed it."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Answer:
    """What a helper says about a part, and the seconds from the question to it."""

    said: dict[str, Any]
    arrays: Arrays
    seconds: float


class RemoteWorker:
    """A helper at the other end of a link. A thread of its own sends and receives, so that nobody waits for it who does
    not want to."""

    def __init__(self, link: Link):
        self._link = link
        self._questions: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()  # None: it was lost
        self._here = threading.Event()
        self._known = 0  # how often it had come when it was last asked
        self._times = 0  # how often it has come
        self._open = 0  # questions that are not answered yet
        self.tokens = 0  # of the part that it was last asked for
        self.late: Answer | None = None  # the last answer to a part that the leader had computed itself by then
        self._thread = threading.Thread(target=self._talk, name="helper", daemon=True)
        self._thread.start()

    def _talk(self) -> None:
        try:
            while True:
                here = read_message(self._link.recv_bytes())[0].get("say") != LOST
                if here:
                    self._times += 1
                    self._here.set()
                while self._here.is_set():
                    question = self._questions.get()
                    if question is None:
                        return
                    self._answers.put(self._asked(question))
        except (EOFError, OSError, ValueError):
            pass  # it is lost for good, as below
        finally:
            self._here.clear()
            self._answers.put(None)
            self._link.close()

    def _asked(self, question: bytes) -> Answer | None:
        begin = time.monotonic()
        self._link.send_bytes(question)
        header, arrays = read_message(self._link.recv_bytes())
        if header.get("say") == LOST:
            self._here.clear()
            return None
        return Answer(header, arrays, time.monotonic() - begin)

    # -- the leader's side -----------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether it may be asked: it is there, and has answered everything."""
        while self._open and not self._answers.empty():
            self.late = self._answers.get()
            self._open -= 1
        return self._here.is_set() and not self._open

    @property
    def new(self) -> bool:
        """Whether it has come anew since it was last asked, so that it does not know the run yet."""
        return self._times != self._known

    def ask(self, question: bytes, tokens: int) -> None:
        """Ask a helper that is ready for a part of so many tokens; returns at once."""
        self._known, self.tokens = self._times, tokens
        self._open += 1
        self._questions.put(question)

    def answer(self, seconds: float) -> Answer | None:
        """The answer to the only open question; None if it is late, or the helper was lost."""
        try:
            result = self._answers.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None
        self._open -= 1
        return result

    def close(self) -> None:
        """Hang up, as soon as nothing is being computed."""
        self._questions.put(None)
