"""What this process holds of a device that it opened: as much as its work needs, and no less than what stays there.

A model stays on the device between two calls, so a lease outlives the call that loaded it.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from wgpu_lora.events import SILENT, Events
from wgpu_lora.share.budget import Budget, budget_bytes, device_memory
from wgpu_lora.share.entry import Entry
from wgpu_lora.share.lease import NO_QUEUE, Advice, take, update
from wgpu_lora.share.ledger import Ledger, device_key

if TYPE_CHECKING:
    from wgpu_lora.gpu.device import Device
    from wgpu_lora.gpu.devices import DeviceInfo

STAYS = "what stays loaded"


@dataclass(eq=False)
class _Holding:
    """leases: of this process on one opened device, in the order in which they were taken. claims: by thread, how many
    go on and what the outermost needs."""

    ledger: Ledger
    owner: int = field(default_factory=os.getpid)
    leases: list[tuple[Entry, ExitStack]] = field(default_factory=list)
    claims: dict[int, tuple[int, int]] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry, _ in self.leases)

    def missing(self, device: Device, new: int) -> int:
        """The bytes that a claim of this thread takes beyond what is held."""
        others = sum(need for thread, (_, need) in self.claims.items() if thread != threading.get_ident())
        return device.allocated + new + others - self.bytes

    def begin(self, new: int, leases: list[tuple[Entry, ExitStack]]) -> None:
        """Counts a claim of this thread, which has got its leases."""
        self.leases += leases
        depth, need = self.claims.get(threading.get_ident(), (0, new))
        self.claims[threading.get_ident()] = depth + 1, need

    def finish(self, device: Device) -> None:
        """Counts the end of a claim of this thread; after the last one, only what is allocated stays held."""
        depth, need = self.claims.pop(threading.get_ident())
        if depth > 1:
            self.claims[threading.get_ident()] = depth - 1, need
        if not self.claims:
            self.shrink(device.allocated)

    def shrink(self, to: int) -> None:
        """Gives back all but `to` bytes, the newest first."""
        while self.leases and self.bytes > to and self.owner == os.getpid():  # a fork has the parent's in its memory
            entry, stack = self.leases.pop()
            keep = to - self.bytes
            if keep <= 0:
                stack.close()
                continue
            kept = replace(entry, bytes=keep, what=STAYS)
            update(self.ledger, kept)
            self.leases.append((kept, stack))


_HOLDINGS: WeakKeyDictionary[Device, _Holding] = WeakKeyDictionary()
_NOT_ENDED: list[_Holding] = []  # also of devices that are gone


@contextmanager
def claim(
    device: Device,
    new: int,
    what: str,
    budget: Budget | None = None,
    wait: float | None = NO_QUEUE,
    events: Events = SILENT,
    advise: Advice = lambda free: "",
) -> Iterator[None]:
    """Holds room for `new` bytes beside what is allocated on a device, while the block runs.

    What it leaves allocated stays held until a later claim, the device or this process ends. Within another claim of
    its thread it takes no more than that one's plan has left out; those of other threads add up.

    Args:
        budget: by default the device's own. Where it is not the user's word, what the system says is free counts too.
        wait, events: as for `take`.

    Raises:
        UserError: see `take`.
    """
    holding = _holding(device)
    with holding.lock:
        more = holding.missing(device, new)
    # Without the lock: a wait may be for what another thread is about to give back.
    leases = [_take(holding, device.info, more, what, budget, wait, events, advise)] if more > 0 else []
    with holding.lock:
        holding.begin(new, leases)
    try:
        yield
    finally:
        with holding.lock:
            holding.finish(device)


def _holding(device: Device) -> _Holding:
    holding = _HOLDINGS.get(device)
    if holding is None or holding.owner != os.getpid():
        holding = _HOLDINGS[device] = _Holding(Ledger(device_key(device.info)))
        _NOT_ENDED.append(holding)
        # On a thread of its own: a collection may come while this one changes the ledger.
        gone = weakref.finalize(device, lambda: threading.Thread(target=_end, args=(holding,), daemon=True).start())
        gone.atexit = False  # _leave does that
    return holding


def _end(holding: _Holding) -> None:
    with holding.lock:
        holding.shrink(0)
        if holding in _NOT_ENDED:
            _NOT_ENDED.remove(holding)


def _take(
    holding: _Holding,
    info: DeviceInfo,  # and no device: what is kept must not keep it
    more: int,
    what: str,
    budget: Budget | None,
    wait: float | None,
    events: Events,
    advise: Advice,
) -> tuple[Entry, ExitStack]:
    stated = budget is not None and budget.stated
    limit = (budget or budget_bytes(info)).bytes

    def free() -> int | None:
        memory = None if stated else device_memory(info)
        return None if memory is None else memory.free

    stack = ExitStack()
    lease = take(holding.ledger, more, limit, what, wait, events, advise, held=holding.bytes, free=free)
    return stack.enter_context(lease), stack


@atexit.register
def _leave() -> None:
    for holding in [*_NOT_ENDED]:
        _end(holding)
