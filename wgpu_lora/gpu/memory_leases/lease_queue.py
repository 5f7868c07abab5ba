"""Leases on device memory for the time of a run, and the queue for them, first come first served."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from wgpu_lora.errors import NoRoomError, UserError
from wgpu_lora.events import SILENT, Events
from wgpu_lora.gpu.memory_leases.ledger import RENEW_SECONDS, Ledger, LedgerEntry
from wgpu_lora.names.spelling import any_option, flag

SETTLING = 20.0  # seconds until the system sees the memory of a new lease as used
NO_QUEUE = -1.0  # for commands without --wait
FIRST_PAUSE, LAST_PAUSE = 1.0, 30.0  # seconds between a waiter's looks, each of which renews its place

Advice = Callable[[int], str]  # free bytes -> options that would make the run fit, or ""
Free = Callable[[], int | None]


@contextmanager
def take(
    ledger: Ledger,
    need: int,
    budget: int | None,
    purpose: str,
    wait: float | None = None,
    events: Events = SILENT,
    advise: Advice = lambda free: "",
    own_bytes: int = 0,
    free: Free = lambda: None,
) -> Iterator[LedgerEntry]:
    """Hold `need` bytes of a ledger's device while the block runs.

    Args:
        need, budget: bytes; with a budget of None there is no limit, but the lease is still recorded.
        purpose: in a few words, shown to other users.
        wait: seconds to queue for, `math.inf` for no limit; None and NO_QUEUE do not queue, nor overtake a queue.
        events: `waiting` is called each time a waiter looks and does not get the memory yet.
        advise: what would make the run fit into the memory that is left; part of the refusal.
        own_bytes: bytes that this process already holds under other leases, and still needs.
        free: bytes that the system reports as free now, None if unknown; accounts for programs that take no leases.

    Raises:
        NoRoomError: `need` exceeds the budget, or the memory is held by others, also at the end of the wait.
        UserError: the ledger is damaged or cannot be written.
    """
    if budget is not None and own_bytes + need > budget:
        ways = "use a smaller batch, fewer tokens or a smaller model"  # the command has no options for a run
        if wait != NO_QUEUE:
            lower = any_option("per_device_train_batch_size", "max_length")
            ways = f"lower {lower}, or raise {flag('memory_budget')} if the device has more"
        raise NoRoomError(
            f"This run needs {own_bytes + need:,} bytes of device memory, but the budget is {budget:,}: {ways}."
        )
    entry, stop = LedgerEntry.of_this_process(need, purpose), threading.Event()
    try:
        with _unwinding_on_sigterm():
            _wait_for_turn(ledger, entry, budget, wait, events, advise, free)
        threading.Thread(target=_renew, args=(ledger, entry, stop), daemon=True).start()
        del events, advise, free  # which may refer to the device, whose end ends a lease on what stays there
        yield entry
    finally:
        stop.set()
        with suppress(UserError):  # it is reclaimed once this process has ended
            _remove(ledger, entry)


@dataclass(frozen=True)
class QueueStatus:
    """Result of a look at the ledger: whether the memory is granted, who holds it, and how many runs are ahead."""

    granted: bool
    holders: list[LedgerEntry]
    ahead: int
    free: int | None  # bytes, if the system reports too few


def _wait_for_turn(
    ledger: Ledger,
    entry: LedgerEntry,
    budget: int | None,
    wait: float | None,
    events: Events,
    advise: Advice,
    free: Free,
) -> None:
    begin, pause = time.monotonic(), FIRST_PAUSE
    seconds = max(wait or 0, 0)
    while not (look := _look(ledger, entry, budget, bool(seconds), free)).granted:
        waited = time.monotonic() - begin
        remaining = seconds - waited
        if remaining <= 0:
            raise NoRoomError(_refusal(entry, budget, look, wait, advise))
        events.waiting(look.ahead + 1, [entry.owner for entry in look.holders], waited)
        time.sleep(min(pause, remaining))
        pause = min(2 * pause, LAST_PAUSE)


def _look(ledger: Ledger, entry: LedgerEntry, budget: int | None, queue: bool, free: Free) -> QueueStatus:
    """Take the memory if there is enough and no other run is ahead; else, with `queue`, take or renew a place."""
    reported, request_time = free(), time.time()  # before the lock is taken, since it may take long
    with ledger.changing() as entries:
        local_entries = [e for e in entries if e.is_of_this_host]
        holders = [e for e in local_entries if e.holds]
        queue_ids = [e.id for e in local_entries if not e.holds]
        ahead = queue_ids.index(entry.id) if entry.id in queue_ids else len(queue_ids)
        room = budget is None or sum(e.bytes for e in holders) + entry.bytes <= budget
        now = time.time()
        if reported is not None:  # others may not have allocated what they were just granted
            other_holders = (e for e in holders if (e.host, e.pid) != (entry.host, entry.pid))
            reported = max(0, reported - sum(e.bytes for e in other_holders if request_time - e.since < SETTLING))
        short = reported if reported is not None and reported < entry.bytes else None
        granted = room and not ahead and short is None
        if granted or queue:
            _upsert(entries, replace(entry, holds=granted, since=now if granted else entry.since, renewed=now))
    return QueueStatus(granted, holders, ahead, short)


def _refusal(entry: LedgerEntry, budget: int | None, look: QueueStatus, wait: float | None, advise: Advice) -> str:
    reasons = []
    if look.holders:
        holders = ", ".join(f"{e.bytes:,} by {e.owner}" for e in look.holders)
        reasons.append(f"{sum(e.bytes for e in look.holders):,} bytes are held ({holders})")
    if look.ahead:
        reasons.append(f"{look.ahead} other {'run waits' if look.ahead == 1 else 'runs wait'} before it")
    if look.free is not None:
        reasons.append(f"the system reports {look.free:,} bytes as free")
    room = None if budget is None or look.ahead else budget - sum(e.bytes for e in look.holders)
    limits = [nbytes for nbytes in (room, look.free) if nbytes is not None]
    room = min(limits, default=None)
    of = "" if budget is None else f" of a budget of {budget:,}"
    ways = ["try again when they have ended"]
    if wait != NO_QUEUE:
        smaller = (room is not None and advise(room)) or f"lower {flag('per_device_train_batch_size')}"
        ways = ["wait longer" if wait else f"queue for it with {flag('wait')}", smaller]
    after = f"After {wait:g} s of waiting, this" if wait and wait != NO_QUEUE else "This"
    return (
        f"{after} run cannot get the {entry.bytes:,} bytes of device memory that it needs{of}, since "
        f"{' and '.join(reasons)}: {', '.join(ways)}, or see 'wgpu-lora share status'."
    )


def _renew(ledger: Ledger, entry: LedgerEntry, stop: threading.Event) -> None:
    """Renew a lease every RENEW_SECONDS, and write it again if the ledger was lost."""
    while not stop.wait(RENEW_SECONDS):
        with suppress(UserError), ledger.changing() as entries:  # a damaged ledger may be repaired later
            if not stop.is_set():  # checked under the lock, so that a released lease does not come back
                current = next((e for e in entries if e.id == entry.id), entry)
                _upsert(entries, replace(current, holds=True, renewed=time.time()))


def _upsert(entries: list[LedgerEntry], entry: LedgerEntry) -> None:
    """Replace the entry with this id, or append it."""
    ids = [e.id for e in entries]
    index = ids.index(entry.id) if entry.id in ids else len(ids)
    entries[index : index + 1] = [entry]


def update(ledger: Ledger, entry: LedgerEntry) -> None:
    """Write the new state of a lease, unless the ledger is damaged."""
    with suppress(UserError), ledger.changing() as entries:
        _upsert(entries, replace(entry, holds=True, renewed=time.time()))


def _remove(ledger: Ledger, entry: LedgerEntry) -> None:
    with ledger.changing() as entries:
        entries[:] = [e for e in entries if e.id != entry.id]


@contextmanager
def _unwinding_on_sigterm() -> Iterator[None]:
    """Make SIGTERM exit through the `finally` blocks, so that a waiter leaves the queue."""
    in_main = threading.current_thread() is threading.main_thread()  # only the main thread may set a handler
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
