"""A tracker in a process of its own, so that whatever it does, the run goes on: it costs at most one warning."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from wgpu_lora.errors import TrackingWarning
from wgpu_lora.signals import handled
from wgpu_lora.strict_json import to_json
from wgpu_lora.track.secret_masking import masked
from wgpu_lora.track.trackers import TRACKERS
from wgpu_lora.track.trackers.base import Tracked

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from wgpu_lora.track.child import main; main()"
LIMIT = 120.0  # seconds that a message may take: the run does not wait for it
END_LIMIT = 60.0  # seconds for all messages that are left at the end, when the run does wait
_TICK = 0.05


class Remote:
    """A run in a tracker. No method raises or blocks, except `finish`, for at most END_LIMIT."""

    def __init__(self, name: str, run: Tracked):
        self.name, self.place = name, ""
        self._failure: str | None = None
        self._given_up = False
        self._asked = self._answered = 0
        self._since = time.monotonic()  # of the last answer, or of the message before which there was none to wait for
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = _started()
        except OSError as error:
            self._failure = f"its process cannot be started ({error.strerror})"
            return
        for work in (self._write, self._read):
            threading.Thread(target=work, name=f"tracker {name}", daemon=True).start()
        kind = TRACKERS[name]
        self._ask({"tracker": f"{kind.__module__}:{kind.__qualname__}", "begin": asdict(run)})

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._ask({"log": dict(metrics), "step": step})
        self.check(LIMIT)

    def finish(self, status: str) -> None:
        """Wait until everything is reported, or the program is asked to end."""
        self._ask({"finish": status})
        self._since = begun = time.monotonic()
        signals: list[int] = []
        with handled(signals.append):
            while self._alive and self._answered < self._asked:
                self.check(END_LIMIT)
                if signals:
                    self._failure = "it was ended before it had taken everything"
                elif time.monotonic() - begun > END_LIMIT:  # one that answers slowly
                    self._failure = f"it has not taken everything in {END_LIMIT:.0f} s"
                time.sleep(_TICK)
            self.check(END_LIMIT)
            self._end()
        for number in signals:  # for the run, which they are also meant for
            signal.raise_signal(number)

    def check(self, limit: float) -> None:
        """Warn, once, and give up if the tracker has failed, or does not answer for so many seconds."""
        if self._given_up:
            return
        failure = self._failure
        if failure is None and self._answered < self._asked and time.monotonic() - self._since > limit:
            failure = f"it has not answered for {limit:.0f} s"
        if failure is not None:
            self._given_up = True
            self._end()
            message = f"{self.name} is not reported to any more: {failure}; the run and its log.jsonl go on"
            warnings.warn(message, TrackingWarning, stacklevel=2)

    @property
    def _alive(self) -> bool:
        return not self._given_up and self._failure is None

    def _ask(self, message: dict[str, Any]) -> None:
        if not self._alive:
            return
        if self._answered == self._asked:
            self._since = time.monotonic()
        self._asked += 1
        self._out.put(to_json(message, default=str).encode() + b"\n")

    def _end(self) -> None:
        """End the process, which has a moment to exit by itself unless it was given up."""
        self._out.put(None)
        process = self._process
        if process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(0 if self._given_up else 5)
        with suppress(OSError):
            if process.poll() is None and os.name != "nt":
                os.killpg(process.pid, signal.SIGKILL)  # with what the library has started
            process.kill()
            process.wait()

    # -- in threads ------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        assert self._process
        assert self._process.stdin
        with suppress(OSError, ValueError), self._process.stdin as pipe:  # the reader sees why
            while (message := self._out.get()) is not None:
                pipe.write(message)
                pipe.flush()

    def _read(self) -> None:
        assert self._process
        assert self._process.stdout
        with self._process.stdout as answers:
            for line in answers:
                answer = json.loads(line)
                if "error" in answer:
                    self._failure = str(masked(answer["error"]))
                    return
                self.place = str(masked(answer["place"] or self.place))
                self._since = time.monotonic()
                self._answered += 1
        if self._answered < self._asked:
            code = self._process.wait()
            self._failure = f"its process ended ({f'signal {-code}' if code < 0 else f'code {code}'})"


def _started() -> subprocess.Popen[bytes]:
    """The child; a Ctrl-C in the terminal is not for it."""
    apart: dict[str, Any] = {"start_new_session": True}
    if os.name == "nt":
        apart = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}  # type: ignore[attr-defined,unused-ignore]
    return subprocess.Popen(
        [sys.executable, "-c", _START, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        **apart,
    )
