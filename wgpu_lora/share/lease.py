"""Holding a part of a device's memory while a run goes on, and waiting for it, first come first served."""

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
from wgpu_lora.names.naming import either, flag
from wgpu_lora.share.entry import RENEW_SECONDS, Entry
from wgpu_lora.share.ledger import Ledger

SETTLING = 20.0  # seconds from a lease to when its memory is in use, and seen as such by the system
NO_QUEUE = -1.0  # where there is no option to wait either
FIRST_PAUSE, LAST_PAUSE = 1.0, 30.0  # seconds between a waiter's looks; each is a renewal of its place too

Advice = Callable[[int], str]  # bytes that are free -> what to do to need no more, or nothing
Free = Callable[[], int | None]


@contextmanager
def take(
    ledger: Ledger,
    need: int,
    budget: int | None,
    what: str,
    wait: float | None = None,
    events: Events = SILENT,
    advise: Advice = lambda free: "",
    held: int = 0,
    free: Free = lambda: None,
) -> Iterator[Entry]:
    """Holds `need` bytes of a ledger's device while the block runs.

    Args:
        need, budget: bytes; a budget of None sets no limit, and what is held is recorded all the same.
        what: what for, a few words that others read.
        wait: seconds to queue for, `math.inf` for as long as it takes; None and NO_QUEUE do not queue, and do not go
            before those who do.
        events: told of `waiting` at each look of a waiter that does not get the memory yet.
        advise: what would need no more than what others leave; part of the refusal.
        held: bytes that this process holds already under other leases, and needs as well.
        free: bytes that the system says are free now, None where it does not say: programs that take no lease count.

    Raises:
        NoRoomError: `need` is over the budget, which no waiting mends; or the memory is held by others, or still is at
            the end of the wait.
        UserError: the ledger is damaged or cannot be written.
    """
    if budget is not None and held + need > budget:
        ways = "use a smaller batch, fewer tokens or a smaller model"  # where there are no options of a run
        if wait != NO_QUEUE:
            lower = either("per_device_train_batch_size", "max_length")
            ways = f"lower {lower}, or raise {flag('memory_budget')} if the device has more"
        raise NoRoomError(
            f"This run needs {held + need:,} bytes of device memory, but the budget is {budget:,}: {ways}."
        )
    entry, stop = Entry.of_this_process(need, what), threading.Event()
    try:
        with _unwinding_on_sigterm():
            _wait_for_turn(ledger, entry, budget, wait, events, advise, free)
        threading.Thread(target=_renew, args=(ledger, entry, stop), daemon=True).start()
        yield entry
    finally:
        stop.set()
        with suppress(UserError):  # then it is reclaimed once this process has ended
            _remove(ledger, entry)


@dataclass(frozen=True)
class Look:
    """What a look at the ledger found: whether the memory is ours now, else who holds it and how many come first."""

    granted: bool
    holders: list[Entry]
    ahead: int
    free: int | None  # bytes, where the system says that they are too few


def _wait_for_turn(
    ledger: Ledger, entry: Entry, budget: int | None, wait: float | None, events: Events, advise: Advice, free: Free
) -> None:
    begin, pause = time.monotonic(), FIRST_PAUSE
    seconds = max(wait or 0, 0)
    while not (look := _look(ledger, entry, budget, bool(seconds), free)).granted:
        waited = time.monotonic() - begin
        left = seconds - waited
        if left <= 0:
            raise NoRoomError(_refusal(entry, budget, look, wait, advise))
        events.waiting(look.ahead + 1, [entry.who for entry in look.holders], waited)
        time.sleep(min(pause, left))
        pause = min(2 * pause, LAST_PAUSE)


def _look(ledger: Ledger, entry: Entry, budget: int | None, queue: bool, free: Free) -> Look:
    """Takes the memory where there is enough and nobody is ahead; else, if `queue`, keeps or takes a place."""
    with ledger.changing() as entries:
        here = [e for e in entries if e.here]
        holders = [e for e in here if e.holds]
        waiting = [e.id for e in here if not e.holds]
        ahead = waiting.index(entry.id) if entry.id in waiting else len(waiting)
        room = budget is None or sum(e.bytes for e in holders) + entry.bytes <= budget
        says, now = free(), time.time()
        if says is not None:  # what others were granted just now is not allocated yet
            others = (e for e in holders if (e.host, e.pid) != (entry.host, entry.pid))
            says = max(0, says - sum(e.bytes for e in others if now - e.since < SETTLING))
        short = says if says is not None and says < entry.bytes else None
        granted = room and not ahead and short is None
        if granted or queue:
            _put(entries, replace(entry, holds=granted, since=now if granted else entry.since, renewed=now))
    return Look(granted, holders, ahead, short)


def _refusal(entry: Entry, budget: int | None, look: Look, wait: float | None, advise: Advice) -> str:
    reasons = []
    if look.holders:
        held = ", ".join(f"{e.bytes:,} by {e.who}" for e in look.holders)
        reasons.append(f"{sum(e.bytes for e in look.holders):,} bytes are held ({held})")
    if look.ahead:
        reasons.append(f"{look.ahead} other {'run waits' if look.ahead == 1 else 'runs wait'} before it")
    if look.free is not None:
        reasons.append(f"the system says that {look.free:,} bytes are free now")
    left = None if budget is None or look.ahead else budget - sum(e.bytes for e in look.holders)
    known = [nbytes for nbytes in (left, look.free) if nbytes is not None]
    left = min(known, default=None)
    of = "" if budget is None else f" of a budget of {budget:,}"
    ways = ["try again when they have ended"]
    if wait != NO_QUEUE:
        smaller = (left is not None and advise(left)) or f"lower {flag('per_device_train_batch_size')}"
        ways = ["wait longer" if wait else f"queue for it with {flag('wait')}", smaller]
    after = f"After {wait:g} s of waiting, this" if wait and wait != NO_QUEUE else "This"
    return (
        f"{after} run cannot have the {entry.bytes:,} bytes of device memory that it needs{of}, since "
        f"{' and '.join(reasons)}: {', '.join(ways)}, or see 'wgpu-lora share status'."
    )


def _renew(ledger: Ledger, entry: Entry, stop: threading.Event) -> None:
    """Says every RENEW_SECONDS that the lease's owner is there; a lease that a lost ledger forgot is written again."""
    while not stop.wait(RENEW_SECONDS):
        with suppress(UserError), ledger.changing() as entries:  # a ledger out of order now is mended some day
            if not stop.is_set():  # asked under the lock: a lease that has been freed must not come back
                known = next((e for e in entries if e.id == entry.id), entry)
                _put(entries, replace(known, holds=True, renewed=time.time()))


def _put(entries: list[Entry], entry: Entry) -> None:
    """Replaces the entry of this id where it stands, else adds it at the end."""
    ids = [e.id for e in entries]
    place = ids.index(entry.id) if entry.id in ids else len(ids)
    entries[place : place + 1] = [entry]


def update(ledger: Ledger, entry: Entry) -> None:
    """Writes what has become of a lease. A ledger that is out of order keeps what it had."""
    with suppress(UserError), ledger.changing() as entries:
        _put(entries, replace(entry, holds=True, renewed=time.time()))


def _remove(ledger: Ledger, entry: Entry) -> None:
    with ledger.changing() as entries:
        entries[:] = [e for e in entries if e.id != entry.id]


@contextmanager
def _unwinding_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM end the process through its `finally` blocks, so that a waiter leaves the queue as it goes."""
    in_main = threading.current_thread() is threading.main_thread()  # no other thread may set a handler
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
