"""Memory leases of this process on the devices that it opened: what current work needs plus what stays allocated.

A model stays on the device between calls, so a lease outlives the call that loaded it.
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
from wgpu_lora.gpu.memory_leases.lease_queue import NO_QUEUE, Advice, take, update
from wgpu_lora.gpu.memory_leases.ledger import Ledger, LedgerEntry, device_key
from wgpu_lora.gpu.memory_leases.memory_budget import Budget, budget_bytes, device_memory

if TYPE_CHECKING:
    from wgpu_lora.gpu.device import Device
    from wgpu_lora.gpu.device_list import DeviceInfo

STAYS = "loaded models"


@dataclass(eq=False)
class DeviceClaims:
    """Leases and claims of this process on one opened device.

    leases: in the order in which they were taken. claims: by thread, nesting depth and bytes of the outermost claim.
    """

    ledger: Ledger
    owner: int = field(default_factory=os.getpid)
    leases: list[tuple[LedgerEntry, ExitStack]] = field(default_factory=list)
    claims: dict[int, tuple[int, int]] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry, _ in self.leases)

    def missing(self, device: Device, new: int) -> int:
        """Bytes that a claim of this thread needs beyond what is held."""
        other_needs = sum(need for thread, (_, need) in self.claims.items() if thread != threading.get_ident())
        return device.allocated + new + other_needs - self.bytes

    def begin(self, new: int, leases: list[tuple[LedgerEntry, ExitStack]]) -> None:
        """Record a claim of this thread and its leases."""
        self.leases += leases
        depth, need = self.claims.get(threading.get_ident(), (0, new))
        self.claims[threading.get_ident()] = depth + 1, need

    def finish(self, device: Device) -> None:
        """Record the end of a claim of this thread; after the last one, only allocated memory stays held."""
        depth, need = self.claims.pop(threading.get_ident())
        if depth > 1:
            self.claims[threading.get_ident()] = depth - 1, need
        if not self.claims:
            self.shrink(device.allocated)

    def shrink(self, to: int) -> None:
        """Release all but `to` bytes, which become one lease: each is renewed by a thread of its own, and a device that
        is used for long would gather many."""
        if self.owner != os.getpid() or (len(self.leases) < 2 and self.bytes <= to):  # a fork inherits its parent's
            return
        keep, leases = min(to, self.bytes), self.leases
        self.leases = []
        if keep > 0:
            (entry, stack), *leases = leases
            remainder = replace(entry, bytes=keep, what=STAYS)
            update(self.ledger, remainder)  # before the others end, so that nobody takes what stays
            self.leases = [(remainder, stack)]
        for _, stack in reversed(leases):
            stack.close()


_DEVICE_CLAIMS: WeakKeyDictionary[Device, DeviceClaims] = WeakKeyDictionary()
_NOT_ENDED: list[DeviceClaims] = []  # including those of closed devices


@contextmanager
def claim(
    device: Device,
    new: int,
    purpose: str,
    budget: Budget | None = None,
    wait: float | None = NO_QUEUE,
    events: Events = SILENT,
    advise: Advice = lambda free: "",
) -> Iterator[None]:
    """Hold `new` bytes in addition to what is allocated on a device, while the block runs.

    Memory that is still allocated at the end stays held until a later claim, the device or this process ends. A claim
    nested in another of the same thread takes only what that one does not cover; claims of different threads add up.

    Args:
        budget: by default the device's own. Unless the user set it, the free memory that the system reports counts too.
        wait, events: as for `take`.

    Raises:
        UserError: see `take`.
    """
    device_claims = _device_claims(device)
    with device_claims.lock:
        nbytes = device_claims.missing(device, new)
    # Without the lock: another thread may be about to release what this one waits for.
    leases = [_take(device_claims, device.info, nbytes, purpose, budget, wait, events, advise)] if nbytes > 0 else []
    with device_claims.lock:
        device_claims.begin(new, leases)
    try:
        yield
    finally:
        with device_claims.lock:
            device_claims.finish(device)


def _device_claims(device: Device) -> DeviceClaims:
    device_claims = _DEVICE_CLAIMS.get(device)
    if device_claims is None or device_claims.owner != os.getpid():
        device_claims = _DEVICE_CLAIMS[device] = DeviceClaims(Ledger(device_key(device.info)))
        _NOT_ENDED.append(device_claims)
        # On a separate thread: garbage collection may run while this thread changes the ledger.
        finalizer = weakref.finalize(
            device, lambda: threading.Thread(target=_end, args=(device_claims,), daemon=True).start()
        )
        finalizer.atexit = False  # _release_all does that
    return device_claims


def _end(device_claims: DeviceClaims) -> None:
    with device_claims.lock:
        device_claims.shrink(0)
        if device_claims in _NOT_ENDED:
            _NOT_ENDED.remove(device_claims)


def _take(
    device_claims: DeviceClaims,
    info: DeviceInfo,  # not the device, which the stack would keep alive
    nbytes: int,
    purpose: str,
    budget: Budget | None,
    wait: float | None,
    events: Events,
    advise: Advice,
) -> tuple[LedgerEntry, ExitStack]:
    by_user = budget is not None and budget.stated
    limit = (budget or budget_bytes(info)).bytes

    def free() -> int | None:
        memory = None if by_user else device_memory(info)
        return None if memory is None else memory.free

    stack = ExitStack()
    ledger, own_bytes = device_claims.ledger, device_claims.bytes
    lease = take(ledger, nbytes, limit, purpose, wait, events, advise, own_bytes=own_bytes, free=free)
    return stack.enter_context(lease), stack


@atexit.register
def _release_all() -> None:
    for device_claims in [*_NOT_ENDED]:
        _end(device_claims)
