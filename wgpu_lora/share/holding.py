"""What this process holds of a device that it opened: as much as its work needs, and no less than what stays there.

A model stays on the device between two calls, so a lease outlives the call that loaded it.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from wgpu_lora.share.budget import Budget, budget_bytes, device_memory
from wgpu_lora.share.entry import Entry
from wgpu_lora.share.lease import NO_QUEUE, Advice, Notice, take, update
from wgpu_lora.share.ledger import Ledger, device_key

if TYPE_CHECKING:
    from wgpu_lora.gpu.device import Device

STAYS = "what stays loaded"


@dataclass
class _Holding:
    """leases: of this process on one opened device, in the order in which they were taken. users: claims that go on."""

    ledger: Ledger
    leases: list[tuple[Entry, ExitStack]] = field(default_factory=list)
    users: int = 0

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry, _ in self.leases)

    def shrink(self, to: int) -> None:
        """Gives back all but `to` bytes, the newest first."""
        while self.leases and self.bytes > to:
            entry, stack = self.leases.pop()
            keep = to - self.bytes
            if keep <= 0:
                stack.close()
                continue
            kept = replace(entry, bytes=keep, what=STAYS)
            update(self.ledger, kept)
            self.leases.append((kept, stack))


_HOLDINGS: WeakKeyDictionary[Device, _Holding] = WeakKeyDictionary()


@contextmanager
def claim(
    device: Device,
    new: int,
    what: str,
    budget: Budget | None = None,
    wait: float | None = NO_QUEUE,
    notice: Notice = lambda place, holders, waited: None,
    advise: Advice = lambda free: "",
) -> Iterator[None]:
    """Holds room for `new` bytes beside what is allocated on a device, while the block runs.

    What it leaves allocated stays held until a later claim, or this process, ends. Within another claim on the same
    device it takes no more than that one's plan has left out.

    Args:
        budget: by default the device's own. Where it is not the user's word, what the system says is free counts too.
        wait: as for `take`.

    Raises:
        UserError: see `take`.
    """
    holding = _HOLDINGS.get(device)
    if holding is None:
        holding = _HOLDINGS[device] = _Holding(Ledger(device_key(device.info)))
    _grow(holding, device, new, what, budget, wait, notice, advise)
    holding.users += 1
    try:
        yield
    finally:
        holding.users -= 1
        if not holding.users:
            holding.shrink(device.allocated)


def _grow(
    holding: _Holding,
    device: Device,
    new: int,
    what: str,
    budget: Budget | None,
    wait: float | None,
    notice: Notice,
    advise: Advice,
) -> None:
    more = device.allocated + new - holding.bytes
    if more <= 0:
        return
    stated = budget is not None and budget.stated
    limit = (budget or budget_bytes(device.info)).bytes

    def free() -> int | None:
        memory = None if stated else device_memory(device.info)
        return None if memory is None else memory.free

    stack = ExitStack()
    entry = stack.enter_context(
        take(holding.ledger, more, limit, what, wait, notice, advise, held=holding.bytes, free=free)
    )
    holding.leases.append((entry, stack))


@atexit.register
def _leave() -> None:
    for holding in _HOLDINGS.values():
        holding.shrink(0)
