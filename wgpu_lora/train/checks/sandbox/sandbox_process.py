"""Start a confined process, read its results within limits of time and size, and kill it with all of its children."""

from __future__ import annotations

import encodings
import encodings.aliases
import json
import math
import os
import pkgutil
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.files.assets import ROOT
from wgpu_lora.processes.child_process import python

MEMORY = 512 << 20  # of address space
LISTENER = "answer-listener"  # name of the thread that reads
OUTPUT = 1 << 18  # bytes; the demo's answers return a few hundred
START = 60.0  # seconds for it to become confined
CHILD = "wgpu_lora.train.checks.sandbox.sandbox_child"
ENTRY = f"import sys; sys.path.append(sys.argv.pop(1)); from {CHILD} import main; main()"
SOMETHING_ELSE = "the answer's process sent something other than a result"


class ProcessEnded(Exception):
    """The process ended, timed out, or sent invalid or too much data; the text says why."""


class TimedOutError(ProcessEnded):
    """The process exceeded its time."""


@dataclass(frozen=True)
class Confinement:
    """How a process is confined. filter_error: why it has no seccomp filter, None if it has one."""

    namespaces: Sequence[str]
    limits: Sequence[str]
    filter_error: str | None

    @property
    def missing(self) -> str | None:
        """The missing requirement of a confined process; None if all are met.

        The filter and the memory limit are required. Namespaces are not, since the filter refuses the same operations.
        """
        if self.filter_error:
            return self.filter_error
        return None if "AS" in self.limits else "address space cannot be limited"

    @property
    def unenforced(self) -> list[str]:
        """The limits that the system does not enforce, of: files, network, other processes, memory. Time always is."""
        namespaces = {"files": "mount", "network": "network", "other processes": "PID"}
        result = [limit for limit, kind in namespaces.items() if self.filter_error and kind not in self.namespaces]
        return result + ([] if "AS" in self.limits else ["memory"])

    def __str__(self) -> str:
        parts = [] if self.filter_error else ["a seccomp filter"]
        parts += [f"namespaces ({', '.join(self.namespaces)})"] if self.namespaces else []
        parts += [f"limits ({', '.join(self.limits)})"] if self.limits else []
        return ", ".join([*parts, "a process group, an empty environment and limits of time and output"])


def confinement(allow_unconfined: bool = False) -> Confinement:
    """Start a process to find out how this system confines answers.

    Raises:
        UserError: it cannot confine them, and `allow_unconfined` is not given.
    """
    with SandboxProcess("", 1.0, allow_unconfined) as process:
        return process.confinement


class SandboxProcess:
    """A confined process for one answer: `send` the answer and the calls, then get the results in order with `next`.

    Or `start` it, and `say` one line after the other.

    Raises:
        UserError: the process cannot be confined, and `allow_unconfined` is not given.
    """

    def __init__(self, code: str, timeout: float, allow_unconfined: bool):
        config = {"modules": modules_for(code), "cpu": math.ceil(timeout) + 1, "memory": MEMORY}
        self.timeout = timeout
        self.waits = False  # whether another process waits for the confined one
        self.parsed = False  # whether Python can parse the answer, for callers
        self._flooded = False
        self._popen = subprocess.Popen(
            python("-I", "-S", "-B", "-W", "ignore", "-c", ENTRY, str(ROOT), json.dumps(config)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=os.path.abspath(os.sep),
            env={name: os.environ[name] for name in ("SYSTEMROOT",) if name in os.environ},  # Windows needs it
            start_new_session=True,
        )
        self._chunks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._buffer = bytearray()
        self._reader = threading.Thread(target=self._listen, name=LISTENER, daemon=True)
        self._reader.start()
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name=LISTENER, daemon=True)
        self._writer.start()
        try:
            self.confinement = self._wait_for_confinement(allow_unconfined)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SandboxProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def send(self, code: str, calls: Sequence[tuple[str, str, str]]) -> None:
        """Send the answer, and the calls as (name, arguments, keyword arguments). The time limit starts here."""
        self.start({"code": code})
        for call in calls:
            self.say([*call, False])
        self._lines.put(b"")

    def start(self, job: dict[str, str]) -> None:
        """Send the job; the time limit starts here."""
        self._wait_until(self.timeout)
        self.say(job)

    def say(self, message: Any) -> None:
        """Send a line of JSON, without waiting until it is read; if the process has ended, `next` reports that."""
        self._lines.put(json.dumps(message).encode() + b"\n")

    def next(self) -> tuple[str, str]:
        """The next message: ("parsed", ""), ("value", JSON of plain data), ("raised" or "failed", reason), and those of
        a test.

        Raises:
            EndedError: the process ended or exceeded its time.
        """
        kind, text = self._hear()
        if not isinstance(kind, str) or not isinstance(text, str):
            raise ProcessEnded(SOMETHING_ELSE)
        return kind, text

    def _wait_until(self, seconds: float) -> None:
        self._seconds, self._deadline = seconds, time.monotonic() + seconds

    def _hear(self) -> tuple[Any, Any]:
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            seconds = self._deadline - time.monotonic()
            try:
                if seconds <= 0:  # even if there is more to read
                    raise queue.Empty
                chunk = self._chunks.get(timeout=seconds)
            except queue.Empty:
                raise TimedOutError(f"no answer in {self._seconds:g} s") from None
            if not chunk:
                raise ProcessEnded(self._end())
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            kind, payload = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            raise ProcessEnded(SOMETHING_ELSE) from None
        return kind, payload

    def close(self) -> None:
        """Kill the process with everything that it started."""
        if self.waits and self._ended_by_waiting():
            pass
        elif hasattr(os, "killpg"):
            try:
                os.killpg(self._popen.pid, signal.SIGKILL)  # the group exists until the process is waited for
            except (ProcessLookupError, PermissionError):  # macOS refuses to kill a dead process
                self._popen.kill()
        else:
            self._popen.kill()
        self._popen.wait()
        self._lines.put(b"")
        for thread in (self._writer, self._reader):  # unconfined children may still hold the pipes
            thread.join(1.0)
        assert self._popen.stdout
        if not self._reader.is_alive():
            self._popen.stdout.close()

    def _ended_by_waiting(self) -> bool:
        """Have the waiting process kill the confined one; returns whether it ended.

        If both were killed together, the confined one would be left to init, which in some containers does not reap.
        """
        self._popen.terminate()
        try:
            self._popen.wait(1.0)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _wait_for_confinement(self, allow_unconfined: bool) -> Confinement:
        self._wait_until(START)
        try:
            kind, result = self._hear()
            if kind != "confined":
                raise ProcessEnded(str(result))
        except ProcessEnded as error:
            raise UserError(
                f"The process for a model's code cannot be started ({error}): check that {sys.executable} -I -S runs."
            ) from None
        confinement = Confinement(result["namespaces"], result["limits"], result["filter"])
        self.waits = "PID" in confinement.namespaces
        if confinement.missing and not allow_unconfined:
            raise UserError(
                f"Code that a model wrote cannot be confined on this system, because {confinement.missing}; it would "
                f"run with {confinement} only: use Linux (x86-64 or arm64), or accept that with --allow-unconfined "
                "(allow_unconfined=True)."
            )
        return confinement

    def _write(self) -> None:
        """Write lines until an empty one, then close; in a thread, since an answer may stop reading."""
        assert self._popen.stdin
        with suppress(OSError):
            while line := self._lines.get():
                self._popen.stdin.write(line)
                self._popen.stdin.flush()
        with suppress(OSError):
            self._popen.stdin.close()

    def _listen(self) -> None:
        assert self._popen.stdout
        bytes_left = OUTPUT
        while bytes_left > 0:
            chunk = os.read(self._popen.stdout.fileno(), min(bytes_left, 1 << 16))
            self._chunks.put(chunk)
            if not chunk:
                return
            bytes_left -= len(chunk)
        self._flooded = True
        self._chunks.put(b"")

    def _end(self) -> str:
        if self._flooded:
            return f"wrote more than {OUTPUT:,} bytes"
        try:
            code = self._popen.wait(1.0)
        except subprocess.TimeoutExpired:
            return "stopped answering"
        number = -code if code < 0 else code - 128
        try:
            return f"ended without an answer ({signal.Signals(number).name})"
        except ValueError:
            return f"ended without an answer (exit code {code})"


# Modules that an answer can import. They are imported before the process is confined and can no longer open files.
IMPORTABLE = (
    "abc array base64 binascii bisect calendar cmath codecs collections contextlib copy dataclasses datetime decimal "
    "difflib enum fractions functools hashlib heapq io itertools json keyword math numbers operator os pprint queue "
    "random re reprlib statistics string struct textwrap threading time timeit traceback types typing "
    "unicodedata uuid warnings weakref zlib"
)
# Modules that these import on first use.
NEEDS = {
    "collections": "collections.abc copy heapq",
    "datetime": "_strptime",
    "fractions": "decimal",
    "functools": "types weakref",
    "hashlib": "_md5 _sha1 _sha2 _sha256 _sha512 _sha3 _blake2",
    "singledispatch": "typing",
    "singledispatchmethod": "typing",
    "time": "_strptime",
    "timeit": "linecache traceback",
    "traceback": "ast unicodedata",
    "types": "functools",
    "uuid": "hashlib",
    "warnings": "linecache traceback tracemalloc",
    "weakref": "copy",
}
# Codecs that are always imported, since an answer may compute their names; others only if the answer contains them.
CODECS = (
    "ascii latin_1 utf_8_sig utf_7 utf_16 utf_16_le utf_16_be utf_32 utf_32_le utf_32_be cp437 cp1252 iso8859_15 "
    "rot_13 hex_codec base64_codec unicode_escape raw_unicode_escape"
)


def modules_for(code: str) -> list[str]:
    """The modules that an answer may import: those whose names it contains."""
    words = set(re.findall(r"\w+", code))
    result = set(IMPORTABLE.split()) & words
    result |= {module for name in words & NEEDS.keys() for module in NEEDS[name].split()}
    codecs = set(CODECS.split()) if words & {"encode", "decode", "encoding", "codecs"} else set()
    for name in re.findall(r"""['"]([\w .-]{2,40})['"]""", code):
        name = encodings.normalize_encoding(name.lower())
        codecs.add(encodings.aliases.aliases.get(name, name))
    result |= {f"encodings.{name}" for name in codecs & _all_codecs()}
    if not code.isascii() or r"\N" in code:
        result |= {"unicodedata"}  # used by Python's parser
    return sorted(result)


@cache
def _all_codecs() -> frozenset[str]:
    return frozenset(module.name for module in pkgutil.iter_modules(encodings.__path__))
