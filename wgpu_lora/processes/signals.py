"""What asks the program to end: Ctrl-C, `kill`, a closed terminal; and output that survives the loss of its reader."""

from __future__ import annotations

import _thread
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

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


# -- output streams that survive the loss of their reader, and characters that their encoding lacks --------------------

GONE = (errno.EPIPE, errno.EIO, errno.ESHUTDOWN)  # a pipe without a reader, a closed terminal
FAILING = ("strict", "surrogateescape")  # Python's defaults; both raise for text that cannot be encoded


class _Lasting(io.FileIO):
    """A stream that discards output once its reader has gone, so that a closed terminal does not end a run."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def discard_when_closed(stream: Any) -> Any:
    """Wrap a stream so that output is discarded once its reader has gone.

    Characters that its encoding lacks are escaped, as in "\\u0142", unless PYTHONIOENCODING names another handler.
    """
    try:
        number = stream.fileno()
    except (AttributeError, OSError, ValueError):  # closed before the start, or not a file
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Lasting(number, "w", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace" if stream.errors in FAILING else stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
