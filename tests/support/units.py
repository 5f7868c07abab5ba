"""Units of a cluster in one process: orders, a host's directories, and answers of a coordinator."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from support.cli import QWEN2, SMALL, write_rows
from wgpu_lora.cluster.facts import Answer, Order, Report, Task, from_plain, to_plain
from wgpu_lora.cluster.node.layout import Layout
from wgpu_lora.cluster.node.lease import boot_time
from wgpu_lora.cluster.node.shelf import Shelf
from wgpu_lora.cluster.node.transfer import ShelfPort, Unreachable
from wgpu_lora.cluster.node.work import Work
from wgpu_lora.json_files import to_json
from wgpu_lora.train.run.checkpoint_store import PLAIN_FILES
from wgpu_lora.train.run.run_checkpoint import ADAPTER_FILES, FILES, MANIFEST, METADATA, manifest_of
from wgpu_lora.train.run.run_state import SCHEMA, STATE, RunState

IDENTITY = {"options": {}, "data": "", "base": "", "config": "", "weights": None}
Answering = Callable[[Report], Answer]


def task(name: str, directory: Path, **options: Any) -> Task:
    """A task of a few steps on few rows."""
    rows = directory / f"{name}.jsonl"
    if not rows.exists():
        write_rows(rows)
    given = {**SMALL, "model": QWEN2, "data": str(rows), "run_log": False, **options}
    return Task(name, given, str(directory / name))


def order(*tasks: Task, epoch: int = 1, every: int = 2, **more: Any) -> Order:
    """The order for these tasks, with a checkpoint and a copy every few steps."""
    return Order("run", f"run/{tasks[0].name}", epoch, list(tasks), every, every, **more)


class Site:
    """Hosts by the names of their nodes, each with a directory; those in `away` cannot be reached."""

    def __init__(self, root: Path):
        self.root, self.away = root, set[str]()

    def layout(self, node: str) -> Layout:
        return Layout(self.root / node)

    def shelf(self, node: str) -> Shelf:
        return Shelf(self.layout(node))

    def work(self, given: Order, node: str = "a", **more: Any) -> Work:
        """The unit on a device of a node. Shelves of other nodes get and give pieces, not links."""

        def find(name: str) -> ShelfPort:
            return self.shelf(node) if name in ("", node) else Distant(self, name)

        return Work(given, self.layout(node), node, find, lambda: 0, dict, **more)


class Distant:
    """A shelf as another host uses it."""

    def __init__(self, site: Site, node: str):
        self._site, self._node = site, node

    def __getattr__(self, name: str) -> Any:
        if self._node in self._site.away:
            raise Unreachable(f"{self._node} does not answer.")
        return getattr(self._site.shelf(self._node), name)


def fine(report: Report) -> Answer:
    """The answer of a coordinator that has nothing to ask."""
    return Answer()


def driven(work: Work, answering: Answering = fine, seconds: float = 120) -> list[Report]:
    """Exchange reports until the unit has ended, or is not the device's any more; returns the reports."""
    said, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        report, sent = from_plain(Report, to_plain(work.report())), boot_time()
        said.append(report)
        if work.answered(report, sent, answering(report)):
            work.join(30)
            return said
        work.expired()
        time.sleep(0.02)
    raise AssertionError(f"not over after {seconds} s: {said[-1]}")


def newer(given: Order, **changes: Any) -> Order:
    """The same unit, placed again."""
    return replace(given, epoch=given.epoch + 1, **changes)


# -- without a trainer -------------------------------------------------------------------------------------------------

FAKE = (sys.executable, str(Path(__file__).with_name("fake_trainer.py")))


def write_checkpoint(place: Path, step: int, weights: bytes = b"weights") -> Path:
    """A checkpoint directory as trainers write it, but for what its files of weights hold."""
    state = to_json(
        {"schema": SCHEMA, "state": asdict(RunState(step=step, total_steps=9)), "identity": IDENTITY}, indent=1
    )
    files = dict.fromkeys((*ADAPTER_FILES, *FILES), weights) | {STATE: state.encode(), METADATA: b"{}"}
    PLAIN_FILES.write_directory(place, {**files, MANIFEST: manifest_of(files)})
    return place


def fake_task(name: str, directory: Path, **options: Any) -> Task:
    """A task for FAKE."""
    template = directory / "template"
    if not template.exists():
        write_checkpoint(template, 0)
    return Task(name, {"steps": 6, "template": str(template), **options}, str(directory / name))
