"""The proof's child processes: workers, each with logs and a witness."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from wgpu_lora.proof.watch import EVENTS, Watcher
from wgpu_lora.worker.parent import Worker, end

# A worker that knows the proof's own kinds of jobs. It is started with -S, so that its audit hook is installed before
# site, with its sitecustomize, is imported.
WORKER = f"""
import sys
HEARD = []
def hear(event, arguments, keep=HEARD.append, wanted={EVENTS!r}):
    if event in wanted:
        keep((event, arguments))
sys.addaudithook(hear)
import site
site.main()
from wgpu_lora.proof.watch import witness
with witness(sys.argv[1], HEARD):
    from wgpu_lora.cli import main
    from wgpu_lora.proof.jobs import register
    register()
    code = main(["worker", sys.argv[2]])
sys.exit(code)
"""


class Children:
    """Starts the workers, and ends those still running. Everything that they write is in `out`."""

    def __init__(self, out: Path):
        self.logs, cache = out / "logs", out.resolve() / "cache"
        for directory in (self.logs, out / "work", cache / "tmp"):
            directory.mkdir(parents=True, exist_ok=True)
        # Our caches and the drivers', which are otherwise in the user's own directories.
        self.environment = {
            "WGPU_LORA_CACHE_DIR": str(cache),
            "WGPU_LORA_SHARE_DIR": str(cache / "share"),
            "WGPU_LORA_NO_RUN_LOG": "1",
            "MESA_SHADER_CACHE_DIR": str(cache / "mesa"),
            "__GL_SHADER_DISK_CACHE_PATH": str(cache),
            **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(cache / "tmp")),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.started: list[Worker] = []
        self.watcher = Watcher()
        self.watcher.start()

    def start(self, name: str, job: str, asked: bool = False, **options: Any) -> Worker:
        program = [sys.executable, "-S", "-c", WORKER, str(self.witness(name))]
        child = Worker(
            job, options, name=name, program=program, environment=self.environment, place=self.logs, asked=asked
        )
        self.started.append(child)
        return child

    def run(self, name: str, job: str, **options: Any) -> Any:
        """The result of a job. Raises WorkerFailed if it fails."""
        return self.start(name, job, **options).result()

    def witness(self, name: str) -> Path:
        """Where a child writes its account of itself when it ends."""
        return self.logs / f"{name}.witness.json"

    def end(self) -> None:
        """Ends those still running, with their own children."""
        end(self.started)
        self.watcher.stop()
