"""What asks a program to end: Ctrl-C, `kill`, and a terminal that closes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Windows has no SIGHUP.
ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextmanager
def handled(act: Callable[[int], None]) -> Iterator[None]:
    """Calls `act` with the number of each signal that asks to end; a no-op on any thread but the main one.

    Those that are ignored stay so: `nohup` ignores SIGHUP, and shells SIGINT of what they start in the background.
    """
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, lambda number, frame: act(number))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
