"""The proof's child processes: workers, each with logs and a witness."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from wgpu_lora.proof.watch import Watcher
from wgpu_lora.proof.witness import EVENTS
from wgpu_lora.worker.parent import Worker, end

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
# A worker that knows the proof's own kinds of jobs, with a witness around all of it.
WORKER = f"""{EARLY}
with Witness(sys.argv[1], HEARD):
    from wgpu_lora.cli import main
    from wgpu_lora.proof.jobs import register
    register()
    code = main(["worker", sys.argv[2]])
sys.exit(code)
"""


class Children:
    """Starts them, and ends those that are left. Everything they write goes below `out`."""

    def __init__(self, out: Path):
        self.out, self.logs, self.work = out, out / "logs", out / "work"
        for directory in (self.logs, self.work, out / "cache", out / "cache" / "tmp"):
            directory.mkdir(parents=True, exist_ok=True)
        self.started: list[Worker] = []
        self.watcher = Watcher()
        self.watcher.start()

    def environment(self) -> dict[str, str]:
        """Caches, ledgers and temporary files of ours and of the drivers, kept out of the user's own directories."""
        cache = self.out.resolve() / "cache"
        return {
            "WGPU_LORA_CACHE_DIR": str(cache),
            "WGPU_LORA_SHARE_DIR": str(cache / "share"),
            "MESA_SHADER_CACHE_DIR": str(cache / "mesa"),
            "__GL_SHADER_DISK_CACHE_PATH": str(cache),
            **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(cache / "tmp")),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def start(self, name: str, job: str, **options: Any) -> Worker:
        """Starts a job."""
        program = [sys.executable, "-S", "-c", WORKER, str(self.witness(name))]
        child = Worker(job, options, name=name, program=program, environment=self.environment(), place=self.logs)
        self.started.append(child)
        return child

    def run(self, name: str, job: str, **options: Any) -> Any:
        """Runs a job to its end and returns its result. Raises WorkerFailed where it did not end well."""
        return self.start(name, job, **options).result()

    def witness(self, name: str) -> Path:
        """Where a child says at its end what it has seen of itself."""
        return self.logs / f"{name}.witness.json"

    def end(self) -> None:
        """Ends those that run, with their own children."""
        end(self.started)
        self.watcher.stop()
