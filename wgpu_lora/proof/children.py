"""The proof's child processes: real wgpu-lora commands and jobs, each with logs and a witness."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from wgpu_lora.proof.finding import ChildFailed
from wgpu_lora.proof.watch import Watcher
from wgpu_lora.proof.witness import EVENTS

# Started with -S, a child hears what is run and opened before site, with its sitecustomize, is imported.
EARLY = f"""
import sys
HEARD = []
def hear(event, told, keep=HEARD.append, wanted={EVENTS!r}):
    if event in wanted:
        keep((event, told))
sys.addaudithook(hear)
import site
site.main()
from wgpu_lora.proof.witness import Witness
"""
# The console script's own two lines, with a witness around them.
COMMAND = f"""{EARLY}
with Witness(sys.argv.pop(1), HEARD):
    from wgpu_lora.cli import main
    code = main()
sys.exit(code)
"""
JOB = f"""{EARLY}
from wgpu_lora.proof.child import main
with Witness(sys.argv.pop(1), HEARD):
    code = main(*sys.argv[1:])
sys.exit(code)
"""
GRACE = 5.0  # seconds between asking a child to end and ending it


@dataclass(frozen=True)
class Child:
    """A started child: `log` has its stdout, `errors` its stderr, `witness` what it said of itself at its end."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    errors: Path
    witness: Path

    def running(self) -> bool:
        return self.process.poll() is None

    def wait(self) -> int:
        return self.process.wait()

    def last_words(self) -> str:
        """The end of what it wrote, for a sentence."""
        for path in (self.errors, self.log):
            lines = path.read_text(errors="replace").split("\n")
            said = [line.strip() for line in lines if line.strip()]
            if said:
                return said[-1][:300]
        return "it said nothing"

    def json(self) -> Any:
        """What a command with --json printed."""
        return json.loads(self.log.read_text())


class Children:
    """Starts them, and ends those that are left. Everything they write goes below `out`."""

    def __init__(self, out: Path):
        self.out, self.logs, self.work = out, out / "logs", out / "work"
        for directory in (self.logs, self.work, out / "cache", out / "cache" / "tmp"):
            directory.mkdir(parents=True, exist_ok=True)
        self.started: list[Child] = []
        self.watcher = Watcher()
        self.watcher.start()

    def environment(self) -> dict[str, str]:
        """Caches, ledgers and temporary files of ours and of the drivers, kept out of the user's own directories."""
        cache = self.out.resolve() / "cache"
        return os.environ | {
            "WGPU_LORA_CACHE_DIR": str(cache),
            "WGPU_LORA_SHARE_DIR": str(cache / "share"),
            "MESA_SHADER_CACHE_DIR": str(cache / "mesa"),
            "__GL_SHADER_DISK_CACHE_PATH": str(cache),
            **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(cache / "tmp")),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def command(self, name: str, *arguments: object) -> Child:
        """Starts a wgpu-lora command."""
        return self._start(name, [COMMAND, *self._witness(name), *map(str, arguments)])

    def job(self, name: str, job: str, **arguments: Any) -> Any:
        """Runs one of `proof.jobs` to its end and returns its result.

        Raises:
            ChildFailed: it did not end well.
        """
        result = self.work / f"{name}.json"
        finish(self._start(name, [JOB, *self._witness(name), str(result), job, json.dumps(arguments)]))
        return json.loads(result.read_text())

    def _witness(self, name: str) -> list[str]:
        return [str(self.logs / f"{name}.witness.json")]

    def _start(self, name: str, arguments: list[str]) -> Child:
        log, errors = self.logs / f"{name}.log", self.logs / f"{name}.stderr.log"
        with log.open("wb") as stdout, errors.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=self.environment(),
            )
        child = Child(name, process, log, errors, Path(self._witness(name)[0]))
        self.started.append(child)
        return child

    def end(self) -> None:
        """Ends those that run, with their own children."""
        living = [child.process for child in self.started if child.running()]
        processes: list[psutil.Process] = []
        for process in living:
            try:
                whole = psutil.Process(process.pid)
                processes += [*whole.children(recursive=True), whole]
            except psutil.Error:
                continue
        for one in processes:
            _quietly(one.terminate)
        for one in psutil.wait_procs(processes, GRACE)[1]:
            _quietly(one.kill)
        for process in living:
            process.wait()
        self.watcher.stop()


def finish(child: Child) -> Child:
    """Waits for a child.

    Raises:
        ChildFailed: its exit code is not 0.
    """
    code = child.wait()
    if code:
        raise ChildFailed(f"{child.name} ended with exit code {code}: {child.last_words()}")
    return child


def _quietly(action: Any) -> None:
    try:
        action()
    except psutil.Error:
        return
