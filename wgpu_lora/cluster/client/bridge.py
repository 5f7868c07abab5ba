"""The driver's connection to a cluster: calls of our actors, through a process of its own that speaks with Ray."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from wgpu_lora.cluster.client.bridge_child import Message, receive, send
from wgpu_lora.cluster.facts import COORDINATOR
from wgpu_lora.cluster.launcher import processes
from wgpu_lora.errors import UserError

CONNECT_SECONDS = 60.0  # Ray's own limits are about 30 s; importing it takes long on a busy machine
CALL_SECONDS = 60.0
GRACE = 5.0  # that Ray's own timeout is given before the process is given up
TICK = 0.2
LAST = 40_000  # bytes of what Ray printed that are looked at
# What Ray prints, while it still tries, where trying is useless.
HOPELESS = ("InvalidAuthToken", "Unauthenticated", "Version mismatch", "version mismatch")
QUIET = {
    "RAY_BACKEND_LOG_LEVEL": "warning",  # errors are read from it
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "PYTHONUNBUFFERED": "1",
}


class ClusterGone(UserError):
    """The cluster, or the actor that was asked, does not answer."""


class ConnectionLost(ClusterGone):
    """The process that speaks with Ray has ended, or was given up: there will be no answer any more."""


class NotConnected(Exception):
    """Connecting failed; the text is what Ray said, in the order in which it said it."""


class Bridge:
    """Calls of actors by name, one at a time.

    Args:
        environment: changes to this process's own, such as Ray's token, as `processes.environment` takes them.
    """

    def __init__(self, environment: Mapping[str, str | None] | None = None) -> None:
        self._file = tempfile.NamedTemporaryFile(prefix="wgpu-lora-ray-", suffix=".log")  # noqa: SIM115
        self._answers: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._number = 0  # of the last request
        self.node = ""  # Ray's id of this machine's node; '' if it is none
        apart: dict[str, Any] = {"start_new_session": True}  # a Ctrl-C in the terminal is not for it
        if os.name == "nt":
            apart = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}  # type: ignore[attr-defined,unused-ignore]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "wgpu_lora.cluster.client.bridge_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._file.fileno(),
            env=processes.environment({**QUIET, **(environment or {})}),
            **apart,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout
        with suppress(EOFError, OSError, ValueError):
            while True:
                self._answers.put(receive(cast("BinaryIO", self._process.stdout)))
        self._answers.put(None)

    def connect(self, address: str) -> None:
        """Join the cluster at an address.

        Raises:
            NotConnected: that failed.
        """
        self._send({"connect": address})
        limit = time.monotonic() + CONNECT_SECONDS
        while True:
            try:
                answer = self._next(TICK)
                break
            except queue.Empty:
                said = self.printed()
                if time.monotonic() > limit or any(word in said for word in HOPELESS):
                    self.close()
                    raise NotConnected(said or f"no answer in {CONNECT_SECONDS:.0f} s") from None
        if answer is None:
            raise NotConnected(self.printed())
        if "error" in answer[0]:
            raise NotConnected(f"{answer[0]['error']}\n{self.printed()}")
        self.node = answer[0]["value"]["node"]

    def call(
        self, actor: str, method: str, *args: Any, data: bytes | None = None, seconds: float = CALL_SECONDS
    ) -> Any:
        """The value that a method of an actor returns: JSON, or bytes.

        Args:
            actor: `coordinator`, or `host:<node>`. args: JSON values. data: a further argument.

        Raises:
            ClusterGone: there is no answer.
            UserError: the request is refused.
        """
        header = {"actor": actor, "call": method, "args": args, "seconds": seconds, "with_bytes": data is not None}
        self._send(header, data or b"")
        try:
            answer = self._next(seconds + GRACE)
        except queue.Empty:
            self.close()
            raise ConnectionLost("The cluster does not answer: see whether its head is running.") from None
        if answer is None:
            raise ConnectionLost("The connection to the cluster is lost: see whether its head is running.")
        found, payload = answer
        if "gone" in found:
            raise ClusterGone(f"The cluster does not answer ({_line(found['gone'])}): see whether its head is running.")
        if found.get("kind") == "UserError":
            raise UserError(found["error"])
        if "error" in found:
            raise RuntimeError(f"{actor}.{method}: {found['error']}")
        if "bytes" in found:
            return payload
        value = found["value"]
        if isinstance(value, dict) and set(value) == {"refused"}:
            raise UserError(value["refused"])
        return value

    def coordinator(self, method: str, *args: Any, seconds: float = CALL_SECONDS) -> Any:
        """The same of the coordinator."""
        return self.call(COORDINATOR, method, *args, seconds=seconds)

    def printed(self) -> str:
        """The last of what Ray has printed."""
        with Path(self._file.name).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LAST))
            return file.read().decode("utf-8", "replace")

    def _next(self, seconds: float) -> Message | None:
        """The answer to the last request, whatever became of those before, whose callers may have been interrupted;
        None, from then on, if the process has ended. Raises queue.Empty."""
        limit = time.monotonic() + seconds
        while True:
            answer = self._answers.get(timeout=max(0.0, limit - time.monotonic()))
            if answer is None:
                self._answers.put(None)
            if answer is None or answer[0]["number"] == self._number:
                return answer

    def _send(self, header: dict[str, Any], data: bytes = b"") -> None:
        assert self._process.stdin
        self._number += 1
        with suppress(OSError, ValueError):  # if it has ended, there is no answer
            send(cast("BinaryIO", self._process.stdin), {**header, "number": self._number}, data)

    def close(self) -> None:
        """End the connection; the cluster and its jobs go on."""
        assert self._process.stdin
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=GRACE if self._process.poll() is None else 0)
        with suppress(OSError):
            if self._process.poll() is None and os.name != "nt":
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
        self._process.wait()
        with suppress(OSError):
            self._file.close()

    def __enter__(self) -> Bridge:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _line(text: str) -> str:
    """The last line that says something, of a bounded length."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return (lines[-1] if lines else "no reason given")[:200].rstrip(".: ")
