"""Entry point of `wgpu-lora`: handles signals during start-up, and output streams that are closed during a run."""

from __future__ import annotations

import atexit
import errno
import io
import os
import signal
import sys
from contextlib import suppress
from typing import Any, NoReturn

from wgpu_lora.signals import ENDING

GONE = (errno.EPIPE, errno.EIO, errno.ESHUTDOWN)  # a pipe without a reader, a closed terminal


def main() -> NoReturn:
    """Run the command line and exit the process."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    sys.stdout, sys.stderr = _lasting(sys.stdout), _lasting(sys.stderr)
    from wgpu_lora.cli import main as run

    _leave(run())


def _end(number: int, frame: object) -> NoReturn:
    """Exit immediately: there is nothing to clean up yet."""
    message = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    try:
        os.write(2, f"wgpu-lora: {message}\n".encode())
    finally:
        os._exit(128 + number)


def _leave(code: int) -> NoReturn:
    """Exit with this code; Python's own shutdown may use another after a signal or a caught KeyboardInterrupt."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


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


def _lasting(stream: Any) -> Any:
    try:
        number = stream.fileno()
    except (AttributeError, OSError, ValueError):  # closed before the start, or not a file
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Lasting(number, "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
