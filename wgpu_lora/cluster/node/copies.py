"""Copies of a unit's checkpoints to a shelf, made beside its training."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from wgpu_lora.cluster.facts import Copy, Order
from wgpu_lora.cluster.node.listing import Listing
from wgpu_lora.cluster.node.shelf import Fenced
from wgpu_lora.cluster.node.snapshot import MovedOn, Snapshots
from wgpu_lora.cluster.node.transfer import ShelfPort, Unreachable, copy_of, send
from wgpu_lora.errors import UserError, reason

Find = Callable[[str], ShelfPort]  # the shelf of a node's host, by the node's id; "" for this host's


@dataclass
class Copies:
    """Copies a unit's directory into the shelf that its order names or, if that cannot be reached, into this host's.

    Attributes:
        going: whether copies may still be written.
        made: called with each copy that a shelf has accepted. problem: why the newest copy failed, a sentence.
    """

    order: Order
    directory: Path
    shelves: Find
    here: str
    going: Callable[[], bool]
    made: Callable[[Copy], None]
    problem: str = ""
    _copied: dict[str, int] = field(default_factory=dict)
    _due: threading.Event = field(default_factory=threading.Event)
    _over: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._snapshots = Snapshots(self.directory)

    def begin(self, resumed: Mapping[str, int]) -> None:
        """Start the thread that copies. resumed: the steps that a shelf has already, by task."""
        self._copied = dict(resumed)
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"copies of {self.order.unit}")
        self._thread.start()

    def saved(self, steps: Mapping[str, int]) -> None:
        """Checkpoints of these steps, by task, have been written: copy them if that is due."""
        every = self.order.mirror_steps
        if every and any(step - self._copied.get(name, 0) >= every for name, step in steps.items()):
            self._due.set()

    def _work(self) -> None:
        while True:
            self._due.wait()
            self._due.clear()
            if self._over or not self.going():
                return
            with suppress(MovedOn):  # again at the next checkpoint
                self.copy()

    def end(self) -> None:
        """End the thread, after the copy that it makes now."""
        self._over = True
        self._due.set()
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join()

    def copy(self, *, ended: bool = False, final: bool = False) -> bool:
        """Make a copy now; whether a shelf has accepted it. `problem` says why not.

        ended: the trainer has ended. final: its results are complete.

        Raises:
            MovedOn: the trainer has replaced files meanwhile.
        """
        place = self.directory.with_name(f".{self.directory.name}.copy")
        with self._lock:
            try:
                return self._copy(place, ended, final)
            except Fenced as error:
                self.problem = str(error)
            except (UserError, Unreachable) as error:
                self.problem = f"The checkpoint was not copied: {error}"
            except OSError as error:
                self.problem = f"The checkpoint was not copied ({reason(error)}): make room on the disk of {place}."
            return False

    def _host(self, final: bool) -> str:
        return (final and self.order.results) or self.order.shelf or self.here

    def _copy(self, place: Path, ended: bool, final: bool) -> bool:
        try:
            files, steps = self._snapshots.take(place, ended=ended)
            if not steps and not final:
                return False  # nothing to resume from
            order, sent, why = self.order, None, ""
            for host in dict.fromkeys((self._host(final), self.here)):
                copy = copy_of(order.unit, order.epoch, files, steps, final=final, host=host)
                try:
                    sent = send(self.shelves(host), copy, files, place, self.going)
                    break
                except Fenced:
                    raise
                except (UserError, Unreachable) as error:  # it cannot be reached, or has no room
                    if host == self.here:
                        raise
                    why = str(error)
            if sent is None:
                return False
            if ended and not final and sent.host != self.here:
                self._keep_here(sent, files, place)
            self._copied = dict(steps)
            self.problem = f"The checkpoint was copied on its own host alone: {why}" if why else ""
            self.made(sent)
            return True
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _keep_here(self, sent: Copy, files: Listing, place: Path) -> None:
        """A trainer that has ended early leaves nothing else: the host that has the copy may be lost before it is
        resumed."""
        with suppress(UserError, Unreachable, OSError):
            send(self.shelves(self.here), replace(sent, host=self.here), files, place, self.going)
