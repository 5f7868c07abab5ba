"""The starting side of a worker: passes a job to it, reads its events, and ends it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from wgpu_lora.cluster.worker.job_file import SCHEMA
from wgpu_lora.processes.child_process import ChildEnded, ChildProcess, python

PROGRAM = python("-m", "wgpu_lora", "worker")
GRACE = 5.0  # seconds between asking a process to end and killing it
REASON = 300  # characters
Event = dict[str, Any]


class WorkerFailed(Exception):
    """A worker failed; `code` is its exit code, None if it timed out."""

    def __init__(self, message: str, code: int | None):
        super().__init__(message)
        self.code = code


class Worker:
    """A job in a process of its own; its files are in `directory`, by default a temporary directory.

    Args:
        name: for its files and error messages. program: the command, to which the job's file is appended.
        environment: changes to this process's own. timeout: seconds in total.
        interactive: whether `ask` or `request` will send requests to it.
    """

    def __init__(
        self,
        job: str,
        options: Mapping[str, Any],
        *,
        name: str | None = None,
        program: Sequence[str] = PROGRAM,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        timeout: float | None = None,
        interactive: bool = False,
    ):
        self.name, self._timeout = name or job, timeout
        self._temporary = None if directory else tempfile.TemporaryDirectory(prefix="wgpu-lora-worker-")
        directory = directory or Path(self._temporary.name if self._temporary else "")
        self.log, self.errors = directory / f"{self.name}.jsonl", directory / f"{self.name}.stderr.log"
        file = directory / f"{self.name}.job.json"
        file.write_text(json.dumps({"schema": SCHEMA, "job": job, "options": options}, indent=1) + "\n")
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self.last: Event = {}
        self._start = time.monotonic()
        try:
            with self.errors.open("wb") as errors:
                self._child = ChildProcess([*program, str(file)], environment=environment, stderr=errors)
        except ChildEnded as error:
            raise WorkerFailed(f"{self.name}: {error}", None) from None
        self.process = self._child.popen
        assert self.process.stdin
        assert self.process.stdout
        if not interactive:
            self.process.stdin.close()
        output = os.dup(self.process.stdout.fileno())  # is read to its end, also after the child has been ended
        self._reader = threading.Thread(target=self._read, args=(output,), daemon=True)
        self._reader.start()

    def _read(self, output: int) -> None:
        with self.log.open("wb") as log, os.fdopen(output, "rb") as lines:
            for line in lines:
                log.write(line)
                log.flush()
                with suppress(ValueError):  # cut off if it was killed
                    self._events.put(json.loads(line))
        self._events.put(None)

    # -- events and requests ---------------------------------------------------------------------------------------

    def events(self) -> Iterator[Event]:
        """The events as they happen. Raises WorkerFailed on a timeout, after ending the worker."""
        while event := self._next():
            yield event

    def _next(self) -> Event | None:
        seconds = None if self._timeout is None else self._start + self._timeout - time.monotonic()
        try:
            event = self._events.get(timeout=None if seconds is None else max(seconds, 0))
        except queue.Empty:
            self.end()
            raise WorkerFailed(f"it took more than {self._timeout:,.0f} s", None) from None
        if event is None:
            self._events.put(None)  # for the next call
            self.process.wait()
        else:
            self.last = event
        return event

    def request(self, request: str, **values: Any) -> None:
        """Send a request without waiting for its answer, which is one of the events."""
        with suppress(ChildEnded):  # its events say so
            self._child.send({"request": request, **values})

    def ask(self, request: str, **values: Any) -> Event:
        """Send a request and return the answer. Raises WorkerFailed if the worker ends or times out."""
        self.request(request, **values)
        for event in self.events():
            if event["event"] == "answer":
                return {name: value for name, value in event.items() if name not in ("schema", "event", "time")}
        raise self._failed()

    # -- its end ---------------------------------------------------------------------------------------------------

    def running(self) -> bool:
        return self.process.poll() is None

    def wait(self) -> int:
        """The exit code, after the worker has ended and its last event has been read."""
        for _ in self.events():
            pass
        return self.process.wait()

    def result(self) -> Any:
        """The result, after the worker has ended. Raises WorkerFailed if its exit code is not 0."""
        if self.wait() or self.last.get("event") != "result":
            raise self._failed()
        return self.last["result"]

    def _failed(self) -> WorkerFailed:
        code = self.process.wait()
        return WorkerFailed(f"{self.name} ended with exit code {code}: {self.failure_reason()}", code)

    def failure_reason(self) -> str:
        """The reason of its end, as part of a sentence."""
        message = self.last.get("message") or self.last.get("said")
        if message:
            return str(message)[:REASON]
        text = [line.strip() for line in self.errors.read_text(errors="replace").split("\n") if line.strip()]
        return text[-1][:REASON] if text else "no message"

    def end(self) -> None:
        """End it and its own children if it is still running: ask first, and kill them after a while."""
        self._child.end(GRACE if self.running() else 0)

    def close(self) -> None:
        """Let a worker that takes requests finish, and end it if it does not."""
        if self.process.stdin and not self.process.stdin.closed:
            with suppress(OSError):
                self.process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=60)
        self.end()
        self._reader.join()
        if self._temporary:
            self._temporary.cleanup()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is not None:
            self.end()
        self.close()
