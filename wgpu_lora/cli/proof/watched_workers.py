"""The proof's child processes: workers that are watched from outside, and write an account of themselves."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import cffi
import psutil

from wgpu_lora.cluster.worker.worker import Worker
from wgpu_lora.processes.child_process import python

PERIOD = 0.2  # seconds between looks
LIBRARY = re.compile(r"\.so(\.|$)|\.dll$|\.dylib$", re.IGNORECASE)
LINUX = sys.platform.startswith("linux")
NO_MAPS = f"{sys.platform} does not let a process read which libraries another has mapped"
UNREADABLE = None if LINUX or hasattr(psutil.Process, "memory_maps") else NO_MAPS
LAUNCHES = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile"}
OPENS = "ctypes.dlopen"
EVENTS = tuple(sorted(LAUNCHES | {OPENS}))


def libraries(pid: int) -> set[str]:
    """Paths of a process's mapped libraries. Raises OSError or psutil.Error if it has ended or may not be read."""
    if LINUX:  # without psutil, which takes ten times as long because it also sums up every mapping's memory
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        paths = {line.split(maxsplit=5)[5] for line in lines if "/" in line}
    else:
        paths = {region.path for region in psutil.Process(pid).memory_maps()}
    return {path for path in paths if LIBRARY.search(path.removesuffix(" (deleted)"))}


@dataclass
class ProcessRecord:
    """A process: its command line, all libraries that were ever mapped, and how many looks found any."""

    pid: int
    parent: int
    command: list[str]
    libraries: set[str] = field(default_factory=set)
    looks: int = 0


class Watcher(threading.Thread):
    """Examines this process and all of its descendants repeatedly, from before the first child until after the last."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.records: dict[psutil.Process, ProcessRecord] = {}
        self._stopped = threading.Event()

    def run(self) -> None:
        self.look()
        while not self._stopped.wait(PERIOD):
            self.look()

    def stop(self) -> list[ProcessRecord]:
        self._stopped.set()
        if self.is_alive():
            self.join()
        return list(self.records.values())

    def look(self) -> None:
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            with suppress(psutil.Error, OSError):  # it has ended
                # Each time: between fork and exec, a child has its parent's command line.
                command = process.cmdline()
                record = self.records.setdefault(process, ProcessRecord(process.pid, process.ppid(), command))
                record.command = command or record.command
                if not UNREADABLE and (mapped := libraries(process.pid)):
                    record.libraries |= mapped
                    record.looks += 1


@contextmanager
def record_own_process(path: str, events: list[tuple[str, Sequence[Any]]]) -> Iterator[None]:
    """Around all of a child's work; writes its modules, libraries mapped and opened, and commands run to a file.

    events: the list that an audit hook appends all EVENTS to.
    """
    dlopen = cffi.FFI.dlopen

    # cffi, by which wgpu opens its library, raises no audit event of its own.
    @wraps(dlopen)
    def recorded_dlopen(ffi: Any, name: Any, *flags: Any) -> Any:
        events.append((OPENS, (name,)))
        return dlopen(ffi, name, *flags)

    cffi.FFI.dlopen = recorded_dlopen
    try:
        yield
    finally:
        cffi.FFI.dlopen = dlopen
        account = {
            "pid": os.getpid(),
            "modules": sorted(sys.modules),
            "libraries": [] if UNREADABLE else sorted(libraries(os.getpid())),
            "opened": sorted({_text(a[0]) for event, a in events if event == OPENS and isinstance(a[0], str | bytes)}),
            "commands": [command_of(event, arguments) for event, arguments in events if event in LAUNCHES],
        }
        Path(path).write_text(json.dumps(account))


def command_of(event: str, arguments: Sequence[Any]) -> list[str]:
    """The words of the command that an audit event starts, the program first."""
    if event == "os.system":
        return ["sh", "-c", _text(arguments[0])]
    if event == "os.startfile":
        return [_text(arguments[0])]
    program, words = arguments[1:3] if event == "os.spawn" else arguments[:2]
    if isinstance(words, str | bytes | os.PathLike):  # Windows takes a line
        words = shlex.split(_text(words), posix=False) if os.name == "nt" else [words]
    texts = [_text(word) for word in words]
    return [_text(program), *texts[1:]] if program else texts


def _text(word: Any) -> str:
    return os.fsdecode(word) if isinstance(word, str | bytes | os.PathLike) else str(word)


# A worker that knows the proof's own kinds of jobs. It is started with -S, so that its audit hook is installed before
# site, with its sitecustomize, is imported.
WORKER = f"""
import sys
events = []
def record(event, arguments, append=events.append, recorded={EVENTS!r}):
    if event in recorded:
        append((event, arguments))
sys.addaudithook(record)
import site
site.main()
from wgpu_lora.cli.proof.watched_workers import record_own_process
with record_own_process(sys.argv[1], events):
    import wgpu_lora.cli.proof.worker_jobs
    from wgpu_lora.cli.app import main
    code = main(["worker", sys.argv[2]])
sys.exit(code)
"""


class Children:
    """Starts the workers, and ends those still running. Everything that they write is in `out`."""

    def __init__(self, out: Path):
        self.logs, self.cache = out / "logs", out.resolve() / "cache"
        for directory in (self.logs, out / "work", self.cache / "tmp"):
            directory.mkdir(parents=True, exist_ok=True)
        # Our caches and the drivers', which are otherwise in the user's own directories; Mesa's may be named.
        self.environment = {
            "WGPU_LORA_CACHE_DIR": str(self.cache),
            "WGPU_LORA_SHARE_DIR": str(self.cache / "share"),
            "WGPU_LORA_NO_RUN_LOG": "1",
            "MESA_SHADER_CACHE_DIR": os.environ.get("MESA_SHADER_CACHE_DIR", str(self.cache / "mesa")),
            "__GL_SHADER_DISK_CACHE_PATH": str(self.cache),
            **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(self.cache / "tmp")),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.workers: list[Worker] = []
        self.watcher = Watcher()
        self.watcher.start()

    def start(self, name: str, job: str, interactive: bool = False, **options: Any) -> Worker:
        program = python("-S", "-c", WORKER, str(self.witness(name)))
        files: dict[str, Any] = {"environment": self.environment, "directory": self.logs}
        self.workers.append(Worker(job, options, name=name, program=program, interactive=interactive, **files))
        return self.workers[-1]

    def run(self, name: str, job: str, **options: Any) -> Any:
        """The result of a job. Raises WorkerFailed if it fails."""
        return self.start(name, job, **options).result()

    def witness(self, name: str) -> Path:
        """Where a child writes its account of itself when it ends."""
        return self.logs / f"{name}.witness.json"

    def end(self) -> None:
        """Ends those still running, with their own children, and removes the caches."""
        for worker in self.workers:
            worker.end()
        self.watcher.stop()
        shutil.rmtree(self.cache, ignore_errors=True)
