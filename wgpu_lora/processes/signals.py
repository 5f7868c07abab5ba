"""Signals that ask the program to end: Ctrl-C, `kill`, and a closed terminal."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Windows has no SIGHUP.
ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

_requested: ContextVar[Callable[[], bool]] = ContextVar("stop_requested", default=lambda: False)


class Stopped(BaseException):
    """Ends work that is asked to stop, and that whoever asked can do again."""


@contextmanager
def stoppable(requested: Callable[[], bool]) -> Iterator[None]:
    """The block's work ends with Stopped once `requested()`: before it submits or compiles anything more for the
    device, and while it waits for a child process."""
    token = _requested.set(requested)
    try:
        yield
    finally:
        _requested.reset(token)


def stop_requested() -> Callable[[], bool]:
    """Whether the work of this thread is asked to stop, as a function for others to call."""
    return _requested.get()


def check_stop() -> None:
    """Raise Stopped if this thread's work is asked to stop."""
    if _requested.get()():
        raise Stopped


@contextmanager
def on_end_signal(act: Callable[[int], None]) -> Iterator[None]:
    """Call `act` with the number of each ending signal received in the block; no-op outside the main thread.

    Ignored signals stay ignored: `nohup` ignores SIGHUP, and shells ignore SIGINT for background jobs.
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


@contextmanager
def end_signal_delayed() -> Iterator[None]:
    """The first ending signal that is received in the block acts after it, unless an exception leaves it."""
    numbers: list[int] = []
    with on_end_signal(numbers.append):
        yield
    if numbers:
        signal.raise_signal(numbers[0])


@contextmanager
def repeat_discarded_interrupts(signal_number: Callable[[], int | None]) -> Iterator[None]:
    """Repeat the signal that `signal_number` returns if the KeyboardInterrupt that it raised was discarded.

    Python discards what is raised in destructors, and in callbacks of C and of weak references. What destructors of
    objects raise that the interrupt left incomplete is not shown.
    """
    show = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        number = signal_number()
        if number is None:
            show(unraisable)
        elif isinstance(unraisable.exc_value, KeyboardInterrupt):
            threading.Timer(0.05, _thread.interrupt_main, [number]).start()  # when the callback is over

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = show
