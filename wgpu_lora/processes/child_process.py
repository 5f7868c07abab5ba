"""A child process that answers messages: lines of JSON on its standard input and output, within limits.

In the child, `serve` has the system limit memory, CPU time, files and processes as far as it can. Here, one thread
watches the wall-clock time and the memory of all busy children, for hangs and for systems without such limits.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import IO, Any

import psutil

from wgpu_lora.files.assets import ROOT
from wgpu_lora.files.paths import working_folder
from wgpu_lora.processes import seccomp
from wgpu_lora.processes.signals import check_stop, stop_requested

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

PATIENCE = 6.0 if os.name == "posix" else 2.0  # ratio of wall-clock to CPU time, for busy machines
TICK = 0.1  # seconds
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import main; main()"


class ChildEnded(Exception):
    """A child process ended, or was ended since it exceeded a limit; the text says why, as the end of a sentence."""


@dataclass(frozen=True)
class Limits:
    """Limits of a child process.

    memory: bytes. output: bytes of a message from it. seconds, seconds_per_mib, max_seconds: CPU time of a request: a
    constant, an amount for each MiB of the request, and their greatest sum.
    """

    memory: int
    seconds: float
    seconds_per_mib: float = 0.0
    max_seconds: float = 60.0
    output: int = 64 << 20

    def seconds_for(self, size: int) -> float:
        """CPU time of a request of `size` bytes."""
        return min(self.seconds + self.seconds_per_mib * size / (1 << 20), self.max_seconds)


def python(*arguments: str) -> list[str]:
    """The command of a Python process. With -P, it imports nothing from the current folder, as every child of ours."""
    return [sys.executable, "-P", *arguments]


def module_command(module: str, *options: str) -> list[str]:
    """The command that calls `main()` of a module, with this process's import path, less the current folder."""
    here = str(working_folder())
    paths = [path for path in map(os.path.abspath, filter(None, sys.path)) if path != here] + [str(ROOT)]
    return python(*options, "-c", _START.format(module), json.dumps(paths))


def python_command(module: str, limits: Limits) -> list[str]:
    """The `module_command` of a module whose `main()` calls `serve`, without the start-up code of site-packages."""
    return [*module_command(module, "-I", "-S"), json.dumps(asdict(limits))]


class ChildProcess:
    """A process in a session of its own, which an interrupt of this one does not reach.

    Args:
        command: program and arguments. environment: changes to this process's own. options: further ones of `Popen`.
        limits: what is watched here while an answer is awaited; None for no limits.

    Raises:
        ChildEnded: it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        limits: Limits | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        stderr: int | IO[bytes] = subprocess.DEVNULL,
        **options: Any,
    ) -> None:
        if sys.platform == "win32":
            options["creationflags"] = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr}
        try:
            self.popen = subprocess.Popen(
                command, env={**os.environ, **(environment or {})}, start_new_session=True, **pipes, **options
            )
        except (OSError, ValueError) as error:
            raise ChildEnded(f"no process can be started: {error}") from None
        self.limits, self.owner = limits, os.getpid()
        self.deadline = float("inf")
        self.seconds = 0.0
        self._stop_requested = stop_requested()
        self.reason = ""  # why it was ended
        self._end = weakref.finalize(self, _end, self.popen, self.owner)

    @property
    def running(self) -> bool:
        """Whether it can be sent messages: it has not been ended, and was not started by a parent of this process."""
        return self._end.alive and self.owner == os.getpid()

    def ask(self, message: Any, factor: int = 1) -> Any:
        """Send a message to `serve` and return its answer, which must come within the time limit.

        An exception, such as an interrupt or Stopped, ends the child, since its answer would be taken for the next one.

        Args:
            factor: how often the child works through the message, which raises the limit.

        Raises:
            ChildEnded: see `receive`.
        """
        data = json.dumps(message)
        seconds = self.limits.seconds_for(len(data) * factor) if self.limits else 0.0
        with self.within(seconds or float("inf")):
            self._write(f"[{seconds}, {data}]")
            return self.receive()

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Watch the child during the block, which may take PATIENCE times as much as `seconds` of CPU time."""
        self.seconds, self.deadline = seconds, time.monotonic() + seconds * PATIENCE
        self._stop_requested = stop_requested()
        _WATCHDOG.add(self)
        try:
            yield
        except BaseException:
            self.end()
            raise
        finally:
            _WATCHDOG.remove(self)

    def send(self, message: Any) -> None:
        """Send a message without waiting for an answer. Raises ChildEnded."""
        self._write(json.dumps(message))

    def _write(self, line: str) -> None:
        assert self.popen.stdin
        try:
            self.popen.stdin.write(line.encode() + b"\n")
            self.popen.stdin.flush()
        except (OSError, ValueError):
            raise self._ended() from None

    def receive(self) -> Any:
        """The next message of the child.

        Raises:
            ChildEnded: it ended, exceeded a limit, or sent something other than a line of JSON.
        """
        assert self.popen.stdout
        limit = self.limits.output if self.limits else -1
        line = b""
        with suppress(OSError, ValueError):
            line = self.popen.stdout.readline(limit)
        if line.endswith(b"\n"):
            try:
                return json.loads(line)
            except (ValueError, RecursionError):
                self.reason = "it sent something other than a message"
        elif len(line) == limit:
            self.reason = f"its output is larger than {limit / (1 << 20):.0f} MiB"
        raise self._ended()

    def _ended(self) -> ChildEnded:
        code = self.end()
        check_stop()
        if code == -getattr(signal, "SIGPROF", 0):
            self.reason = f"it computed for more than {self.seconds:.0f} seconds"
        if self.limits and not self.reason:
            self.reason = f"it needs more than {self.limits.memory >> 20:,} MiB of memory, or crashed"
        return ChildEnded(self.reason or f"it ended with exit code {code}")

    def check_limits(self) -> None:
        """Kill the child if it exceeds its time or memory, or if the work that waits for it is to stop."""
        resident = 0
        with suppress(psutil.Error):
            resident = psutil.Process(self.popen.pid).memory_info().rss
        if time.monotonic() > self.deadline:
            self.reason = f"it computed for more than {self.seconds:.0f} seconds"
            self.popen.kill()
        elif self._stop_requested() or (self.limits and resident > self.limits.memory):
            self.popen.kill()

    def end(self, grace: float = 0.0) -> int:
        """End it with all that it started, after `grace` seconds to end by itself; returns its exit code."""
        self._end.detach()
        return _end(self.popen, self.owner, grace)


def _end(popen: subprocess.Popen[bytes], owner: int, grace: float = 0.0) -> int:
    if owner != os.getpid():  # this is a fork of the process that started it
        return 0
    if grace:
        _signal(popen, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            popen.wait(grace)
    _signal(popen, getattr(signal, "SIGKILL", signal.SIGTERM))
    for file in (popen.stdin, popen.stdout):
        with suppress(OSError):
            if file:
                file.close()
    return popen.wait()


def _signal(popen: subprocess.Popen[bytes], number: int) -> None:
    """Signal the process and its group, unless it has been waited for, after which others may have its number.

    It gets the signal once, since a second one would end it while it handles the first.
    """
    if popen.returncode is not None:
        return
    try:
        os.killpg(popen.pid, number)  # it leads a group of its own
    except (AttributeError, OSError):  # Windows; macOS refuses to signal a group with a dead process
        with suppress(OSError):
            popen.send_signal(number)


class _Watchdog:
    """Checks the limits of busy children, in a thread that ends when there are none."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lock = threading.Lock()
        self._busy: set[ChildProcess] = set()
        self._runs = False

    def add(self, child: ChildProcess) -> None:
        with self._lock:
            self._busy.add(child)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="wgpu-lora-watchdog", daemon=True).start()

    def remove(self, child: ChildProcess) -> None:
        with self._lock:
            self._busy.discard(child)

    def _run(self) -> None:
        while self._runs:
            time.sleep(TICK)
            self._check()  # a method, so that no child is held here meanwhile

    def _check(self) -> None:
        with self._lock:
            busy = list(self._busy)
            self._runs = bool(busy)
        for child in busy:
            child.check_limits()


_WATCHDOG = _Watchdog()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_WATCHDOG.reset)  # its thread is not copied


# -- in the child ------------------------------------------------------------------------------------------------------


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer `ChildProcess.ask` until the parent is gone, within the limits of `python_command`.

    MemoryError ends the process. All modules must have been imported, since files, processes and the network are out of
    reach where the system can refuse them.
    """
    limits = Limits(**json.loads(sys.argv[-1]))
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    devnull = os.open(os.devnull, os.O_RDWR)  # discards what libraries print
    for number in (0, 1, 2):
        os.dup2(devnull, number)
    _limit(limits.memory)
    with suppress(OSError):
        seccomp.load()
    set_timer = (
        partial(signal.setitimer, signal.ITIMER_PROF) if hasattr(signal, "setitimer") else float
    )  # Windows has none
    try:
        for line in source:
            seconds, message = json.loads(line)
            set_timer(seconds)
            reply = json.dumps(answer(message)).encode()
            set_timer(0)
            sink.write(reply + b"\n")
            sink.flush()
    except (MemoryError, BrokenPipeError):
        os._exit(1)


def _limit(memory: int) -> None:
    if resource is None:
        return
    reserved = 0  # address space that a preloaded library may have reserved
    with suppress(OSError, ValueError), open("/proc/self/statm") as file:
        reserved = int(file.read().split()[0]) * resource.getpagesize()
    core = 1 if sys.platform == "linux" else 0  # byte; Linux ignores a limit of 0 where a program receives core dumps
    for name, limit in (("CORE", core), ("AS", memory + reserved), ("FSIZE", 0), ("NPROC", 0)):
        with suppress(AttributeError, ValueError, OSError):  # macOS cannot limit address space
            kind = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(kind)[1]
            value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(kind, (value, value))
