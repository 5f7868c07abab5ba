"""A unit on a device: one worker process, what it says, its copies and its end. Without Ray."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import psutil

from wgpu_lora.cluster.facts import Answer, Copy, Order, Report
from wgpu_lora.cluster.node.copies import Copies, Find
from wgpu_lora.cluster.node.ending import CANCELLED, VANISHED, Ending, ending_of
from wgpu_lora.cluster.node.job import job_of
from wgpu_lora.cluster.node.layout import Layout
from wgpu_lora.cluster.node.lease import Lease, boot_time
from wgpu_lora.cluster.node.progress import Standing
from wgpu_lora.cluster.node.snapshot import MovedOn
from wgpu_lora.cluster.node.transfer import Damaged, Unreachable, restore
from wgpu_lora.cluster.parallel.relay import Relay
from wgpu_lora.errors import UserError, reason
from wgpu_lora.worker.worker import PROGRAM, Worker

PATIENCE = 600.0  # seconds that a cancelled process may take, and that the last copy is tried for
RETRY = 2.0  # seconds between tries
Options = Callable[[dict[str, Any]], dict[str, Any]]  # of a task, with the paths of this host
Parallel = Callable[[Order], Relay]
Index = Callable[[], int | None]  # of the device now; None if it is not there any more


class Work:
    """Trains the tasks of an order once its first report has been answered.

    Args:
        layout: of this host. here: the id of its node. shelves: finds a host's shelf.
        index: finds the device. options: turns a task's options into those of this host; may raise UserError.
        parallel: reaches the helpers of a data-parallel order. program: the worker's command.
    """

    def __init__(
        self,
        order: Order,
        layout: Layout,
        here: str,
        shelves: Find,
        index: Index,
        options: Options,
        parallel: Parallel | None = None,
        *,
        now: Callable[[], float] = boot_time,
        program: Sequence[str] = PROGRAM,
    ):
        self.order, self.lease = order, Lease(order.lease, now)
        self._layout, self._shelves, self._index, self._options = layout, shelves, index, options
        self._program, self._here, self._now, self._parallel = program, here, now, parallel
        self._relay: Relay | None = None
        self.directory = layout.epoch(order.unit, order.epoch)
        self.standing = Standing([task.name for task in order.tasks])
        self.copies = Copies(order, self.directory, shelves, here, self.going, self._copied)
        self._lock = threading.RLock()
        self._copy: Copy | None = None  # that has not been reported
        self._end: Ending | None = None
        self._worker: Worker | None = None
        self._asked: set[str] = set()  # tasks that were asked to end
        self._cancelled = self._killed = False
        self._patience: float | None = None  # until when a cancelled process may take
        self._why = ""  # it was killed
        self._thread = threading.Thread(target=self._run, daemon=True, name=order.unit)

    # -- the coordinator's side ------------------------------------------------------------------------------------

    def going(self) -> bool:
        """Whether the unit is this device's: the lease holds, and nobody has ended it."""
        return not self._killed and self.lease.holds()

    def report(self) -> Report:
        """What there is to report now; a copy and the end are repeated until they were `reported`."""
        with self._lock:
            standing, end = self.standing, self._end
            return Report(
                self.order.unit,
                self.order.epoch,
                dict(standing.progress),
                dict(standing.saved),
                self._copy,
                dict(standing.outcomes),
                end.ended if end else None,
                " ".join(part for part in (end.said if end else "", self.copies.problem, self._missing()) if part),
            )

    def _missing(self) -> str:
        """Why helpers of a data-parallel order are missing."""
        return self._relay.problem if self._relay and not self._end else ""

    def answered(self, report: Report, sent: float, answer: Answer) -> bool:
        """Take in the answer to a report that was sent at this time; returns whether the work is over and may be
        forgotten."""
        if not answer.go_on:
            self.kill()
            return True
        with self._lock:
            if self._copy == report.copy:
                self._copy = None
            first = not self.lease.begun
            self.lease.renew(sent)
            if report.ended is not None:
                return True
        if first:
            self._thread.start()
        if answer.cancel:
            self.cancel()
        for name in answer.end:
            self._end_task(name)
        return False

    def expired(self) -> bool:
        """End the process at once if the lease has run out; returns whether it has. The unit may be another's now, so
        that nothing is copied any more. A process that does not stop when it is asked to is ended, too."""
        if not self.lease.begun or self._end:
            return False
        if self._patience is not None and self._now() > self._patience and self._worker:
            _kill(self._worker)
        if self.lease.holds():
            return False
        self._why = f"The coordinator did not answer for {self.order.lease:g} s."
        self.kill()
        return True

    # -- ending ----------------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Interrupt training; its last checkpoint is copied."""
        with self._lock:
            if self._cancelled:
                return
            self._cancelled, self._patience = True, self._now() + PATIENCE
            if self._worker:
                self._worker.request("stop")

    def _end_task(self, name: str) -> None:
        with self._lock:
            if self._worker and name in self.standing.progress and name not in self._asked:
                self._asked.add(name)
                self._worker.request("end", **({"adapter": name} if len(self.order.tasks) > 1 else {}))

    def kill(self) -> None:
        """End the process and its children at once. No copy is written after this."""
        with self._lock:
            self._killed = True
            worker = self._worker
        if worker:
            _kill(worker)

    def join(self, seconds: float | None = None) -> bool:
        """Wait until the process has ended and what it left is cleared up; returns whether it has."""
        if self._thread.ident:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    # -- the process -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            ending = self._train()
        except Damaged as error:
            ending = Ending("no copy", str(error))
        except UserError as error:  # of this host: its disk, or a path
            ending = Ending("refused" if isinstance(error, Refused) else "failed", str(error))
        except Unreachable as error:  # which is no fault of this device
            ending = Ending("killed", f"What the job needs is on a host that is away: {error}")
        except OSError as error:
            ending = Ending("failed", f"The job could not be started ({reason(error)}).")
        except Exception as error:  # a bug, which must not leave the unit without an end
            ending = Ending("failed", f"{type(error).__name__}: {error}")
        self._release()
        if self._killed:
            shutil.rmtree(self.directory, ignore_errors=True)  # the unit is, or may be, another device's
            ending = Ending("killed", self._why)
        with self._lock:
            self._end = ending

    def _train(self) -> Ending:
        self._prepare()
        index = self._index()
        if index is None:
            return VANISHED
        try:
            order = replace(
                self.order, tasks=[replace(task, options=self._options(task.options)) for task in self.order.tasks]
            )
            job = job_of(order, self.directory, index, resume=self.order.restore is not None)
        except UserError as error:
            raise Refused(str(error)) from None
        own = self.directory / "worker"
        own.mkdir(parents=True, exist_ok=True)
        options = job.options | self._helped()
        with self._lock:
            if self._cancelled or not self.going():
                return self._last_copy(CANCELLED)
            worker = Worker(job.kind, options, place=own, program=self._program, asked=True)
            self._worker = worker
        try:
            self.copies.begin(self.standing.saved)
            for event in worker.events():
                with self._lock:
                    self.standing.hear(event)
                    saved = dict(self.standing.saved)
                if event.get("event") == "saved":
                    self.copies.saved(saved)
            ending = ending_of(worker.wait(), self.standing, worker.failure_reason(), cancelled=self._cancelled)
        finally:
            _kill(worker)
            worker.close()
            self.copies.end()
            self._release()
        return self._last_copy(ending)

    def _helped(self) -> dict[str, Any]:
        """The options of a job with helpers, which are started."""
        if not self.order.helpers or not self._parallel:
            return {}
        self._relay = self._parallel(self.order)
        return {"helpers": self._relay.links}

    def _release(self) -> None:
        if self._relay:
            self._relay.close()

    def _prepare(self) -> None:
        """Make the directory of the epoch, from the copy to resume from if there is one, and remove older ones."""
        order, parent = self.order, self._layout.unit(self.order.unit)
        for old in parent.iterdir() if parent.is_dir() else ():
            if old != self.directory:
                shutil.rmtree(old, ignore_errors=True)
        if order.restore is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            return
        self.standing.doing("copying the checkpoint")
        shelf = self._shelves(order.restore_from or self._here)
        restore(shelf, order.unit, order.restore, self.directory, self.going)
        with self._lock:
            self.standing.resume(self.directory)

    def _last_copy(self, ending: Ending) -> Ending:
        """Copy what the process left: its results, or the newest checkpoint of one that failed."""
        if not self.going():
            return ending
        whole = ending.ended in ("done", "stopped")
        if whole:
            self.standing.doing("copying the results")
        copied, until = False, self._now() + PATIENCE
        while not copied and self.going():
            try:
                copied = self.copies.copy(ended=True, final=whole)
            except MovedOn as error:
                self.copies.problem = f"What the job left cannot be copied: {error}."
                break
            if not whole or self._now() > until:  # what another process would train again is worth waiting for
                break
            if not copied:
                time.sleep(RETRY)
        if ending.ended == "done" and not copied:
            return Ending("failed", "The results could not be copied.")
        shutil.rmtree(self.directory, ignore_errors=True)
        return ending

    def _copied(self, copy: Copy) -> None:
        with self._lock:
            self._copy = copy


class Refused(UserError):
    """What another device would not mend."""


def _kill(worker: Worker) -> None:
    """Kill a process and its children, if it runs: its number may be another's afterwards."""
    if not worker.running():
        return
    with suppress(psutil.Error):
        whole = psutil.Process(worker.process.pid)
        for process in [*whole.children(recursive=True), whole]:
            with suppress(psutil.Error):
                process.kill()
