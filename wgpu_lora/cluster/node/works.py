"""The units of one device: starts, reports and ends them. Without Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from wgpu_lora.cluster.facts import Answer, Order, Report
from wgpu_lora.cluster.node.lease import boot_time
from wgpu_lora.cluster.node.work import Work
from wgpu_lora.errors import UserError

BEAT, WATCH = 1.0, 0.25  # seconds between reports, and between looks at the leases
Make = Callable[[Order], Work]
Tell = Callable[[Report], Answer | None]  # sends a report; None if there was no answer


class Works:
    """Units by name. Reports go out on a thread of their own; another one watches the leases, so that an answer that
    does not come cannot delay the end of a process."""

    def __init__(self, make: Make, tell: Tell, now: Callable[[], float] = boot_time):
        self._make, self._tell, self._now = make, tell, now
        self._works: dict[str, Work] = {}
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._over = False
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._beat, self._watch)]

    def start(self, order: Order) -> None:
        """Take an order; its process starts once the coordinator has answered the first report.

        An older epoch of the unit on this device is ended first; the same one again changes nothing.

        Raises:
            UserError: this device has a newer epoch of the unit.
        """
        with self._lock:
            before = self._works.get(order.unit)
            if before and before.order.epoch > order.epoch:
                raise UserError(f"{order.unit} has been placed again since epoch {order.epoch}: that order is void.")
            if before and before.order.epoch == order.epoch:
                return
            if before:
                before.kill()
            self._works[order.unit] = self._make(order)
            for thread in self._threads:
                if thread.ident is None:
                    thread.start()
        if before:
            before.join(10.0)
        self._wake.set()

    def stop(self, unit: str) -> None:
        """End a unit's process at once, without a last copy."""
        with self._lock:
            work = self._works.pop(unit, None)
        if work:
            work.kill()
            work.join(10.0)

    def units(self) -> dict[str, int]:
        """The epochs of the units that this device has."""
        with self._lock:
            return {unit: work.order.epoch for unit, work in self._works.items()}

    def close(self) -> None:
        """End all processes and threads."""
        self._over = True
        self._wake.set()
        for unit in self.units():
            self.stop(unit)

    def beat(self) -> None:
        """Report all units once."""
        with self._lock:
            works = dict(self._works)
        for unit, work in works.items():
            report, sent = work.report(), self._now()
            answer = self._tell(report)
            if answer is not None and work.answered(report, sent, answer):
                with self._lock:
                    if self._works.get(unit) is work:
                        del self._works[unit]

    def _beat(self) -> None:
        while not self._over:
            self.beat()
            self._wake.wait(BEAT)
            self._wake.clear()

    def _watch(self) -> None:
        while not self._over:
            with self._lock:
                works = list(self._works.values())
            for work in works:
                work.expired()
            time.sleep(WATCH)
