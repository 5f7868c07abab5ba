"""Teacher caches, made by a process on this host's device and kept as parcels. No Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from wgpu_lora.atomic import write_bytes_atomic
from wgpu_lora.cluster.facts import CacheStanding, from_plain, to_plain
from wgpu_lora.cluster.node.ending import ending_of
from wgpu_lora.cluster.node.layout import Layout
from wgpu_lora.cluster.node.progress import Standing
from wgpu_lora.cluster.node.sent import Sent
from wgpu_lora.cluster.node.transfer import Unreachable
from wgpu_lora.cluster.spec.sending import LARGEST_BYTES, LARGEST_FILES, Parcel, parcel
from wgpu_lora.errors import UserError, reason
from wgpu_lora.json_files import read_json, to_json
from wgpu_lora.worker.worker import PROGRAM, Worker

UNASKED_SECONDS = 600.0  # after which nobody wants a cache that is being made
PARCELS = "parcels.json"
Push = Callable[[Parcel, str], None]  # gives a parcel of this host to another node's host
Options = Callable[[dict[str, Any]], dict[str, Any]]  # of a task, with the paths of this host


class Caching:
    """Makes teacher caches one after another; what an interrupted process has finished is kept.

    Args:
        here: the id of this host's node. index: finds the device; None if it has vanished. program: the worker's.
    """

    def __init__(
        self,
        layout: Layout,
        here: str,
        index: Callable[[], int | None],
        options: Options,
        push: Push,
        program: Sequence[str] = PROGRAM,
    ):
        self._layout, self._here, self._index, self._options, self._push = layout, here, index, options, push
        self._program = program
        self._jobs: dict[tuple[str, str], _Job] = {}
        self._lock, self._turn = threading.Lock(), threading.Lock()

    def make(self, run: str, name: str, options: dict[str, Any], attempt: int, keeper: str) -> CacheStanding:
        """How far the caches of a task with these options are; they are begun if they are not being made.

        Args:
            name: of the caches, unique in their run. attempt: a higher one begins again what has failed.
            keeper: id of the node whose host is to have them, too.
        """
        with self._lock:
            job = self._jobs.get((run, name))
            if job is None or (job.standing.ended is not None and attempt > job.attempt):
                job = _Job(self, self._layout.caches(run, name), options, attempt, keeper)
                self._jobs[run, name] = job
                job.thread.start()
            job.asked = time.monotonic()
            return job.standing

    def stop(self, run: str, name: str) -> None:
        """End the process that makes these caches; what is finished of them stays until the run is forgotten."""
        with self._lock:
            job = self._jobs.pop((run, name), None)
        if job:
            job.stop()
            job.thread.join(10.0)

    def close(self) -> None:
        """End all processes."""
        for run, name in list(self._jobs):
            self.stop(run, name)

    # -- for its jobs ----------------------------------------------------------------------------------------------

    def work(self, job: _Job) -> CacheStanding:
        """Make the caches of a job. Raises UserError, Unreachable or OSError."""
        sent, place = Sent(self._layout.sent), job.place
        known = _known(place)
        for name, one in known.items():  # it was killed between these
            if not sent.has(one.digest) and (place / name).is_dir():
                sent.adopt(one, place / name)
        if not known or not all(sent.has(one.digest) for one in known.values()):
            (place / PARCELS).unlink(missing_ok=True)
            with self._turn:
                found = self._made(job)
            if isinstance(found, CacheStanding):
                return found
            # The list first: whatever is moved away after it is known to be a parcel.
            known = {name: parcel(path, LARGEST_BYTES, LARGEST_FILES) for name, path in found.items()}
            plain = {name: to_plain(one) for name, one in known.items()}
            write_bytes_atomic(place / PARCELS, (to_json(plain) + "\n").encode())
            for name, one in known.items():
                sent.adopt(one, Path(found[name]))
        hosts, said = [self._here], ""
        if job.keeper not in ("", self._here):
            try:
                for one in known.values():
                    self._push(one, job.keeper)
                hosts.append(job.keeper)
            except (UserError, Unreachable) as error:  # its tasks get it from this host
                said = f"The teacher cache is on its own host alone: {error}"
        values = {name: one.value for name, one in known.items()}
        return CacheStanding(parcels=values, hosts=hosts, said=said)

    def _made(self, job: _Job) -> dict[str, str] | CacheStanding:
        """The directories of the caches, by option; or why there are none."""
        index = self._index()
        if index is None:
            return CacheStanding(ended="failed", said="The device for evaluations has vanished from its host.")
        training = {name: value for name, value in self._options(job.options).items() if value is not None}
        job.place.mkdir(parents=True, exist_ok=True)
        options = {"training": training, "output": str(job.place), "device": index, "requests": True}
        heard = Standing(["cache"])
        with job.lock:
            if job.stopped:
                return CacheStanding(ended="killed", said="It was stopped.")
            worker = Worker("teacher-cache", options, place=job.place, program=self._program, asked=True)
            job.worker = worker
        try:
            for event in worker.events():
                heard.hear(event)
                if event.get("event") == "evaluating":
                    job.standing = replace(job.standing, rows=event["rows"], total=event["total"])
            end = ending_of(worker.wait(), heard, worker.failure_reason(), cancelled=job.stopped)
        finally:
            job.worker = None
            _kill(worker)
            worker.close()
        if end.ended == "done" and heard.result:
            return {name: str(path) for name, path in heard.result.items()}
        ended = "killed" if end.ended == "stopped" else "failed" if end.ended == "done" else end.ended
        return CacheStanding(ended=ended, said=end.said or "The process that made it was stopped.")


class _Job:
    """Caches that are being made, or have been, by a thread."""

    def __init__(self, caching: Caching, place: Path, options: dict[str, Any], attempt: int, keeper: str):
        self.place, self.options, self.attempt, self.keeper = place, options, attempt, keeper
        self.standing, self.asked = CacheStanding(), time.monotonic()
        self.lock = threading.Lock()
        self.worker: Worker | None = None
        self.stopped = False
        self.thread = threading.Thread(target=self._run, args=(caching,), daemon=True, name=f"caches {place.name}")
        self._watch = threading.Thread(target=self._unasked, daemon=True)

    def _run(self, caching: Caching) -> None:
        self._watch.start()
        try:
            found = caching.work(self)
        except UserError as error:
            found = CacheStanding(ended="refused", said=str(error))
        except Unreachable as error:
            found = CacheStanding(ended="killed", said=f"What it needs is on a host that is away: {error}")
        except OSError as error:
            found = CacheStanding(ended="failed", said=f"It could not be written ({reason(error)}).")
        except Exception as error:  # a bug, which must not leave its tasks waiting
            found = CacheStanding(ended="failed", said=f"{type(error).__name__}: {error}")
        self.standing = replace(found, rows=self.standing.rows, total=self.standing.total)

    def _unasked(self) -> None:
        """End the process once nobody has asked for the caches for a while: there is no coordinator any more."""
        while self.thread.is_alive():
            if time.monotonic() - self.asked > UNASKED_SECONDS:
                self.stop()
            self.thread.join(1.0)

    def stop(self) -> None:
        with self.lock:
            self.stopped = True
            worker = self.worker
        if worker:
            _kill(worker)


def _known(place: Path) -> dict[str, Parcel]:
    """The parcels that the caches of a directory have become; empty if they are not known."""
    with suppress(UserError, ValueError):
        return {name: from_plain(Parcel, one) for name, one in read_json(place / PARCELS).items()}
    return {}


def _kill(worker: Worker) -> None:
    """Kill a process and its children, if it runs."""
    if worker.running():
        with suppress(psutil.Error):
            whole = psutil.Process(worker.process.pid)
            for process in [*whole.children(recursive=True), whole]:
                with suppress(psutil.Error):
                    process.kill()
