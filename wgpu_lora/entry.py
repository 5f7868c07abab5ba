"""Where `wgpu-lora` begins: answers signals before anything large is imported, and takes leave of readers that left."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

from wgpu_lora.lasting import lasting
from wgpu_lora.signals import ENDING


def main() -> NoReturn:
    """Runs the command line of this process, and ends it."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    sys.stdout, sys.stderr = lasting(sys.stdout), lasting(sys.stderr)
    from wgpu_lora.cli import main as run

    _leave(run())


def _end(number: int, frame: object) -> NoReturn:
    """Ends at once: nothing has begun that would have to be put in order."""
    message = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    try:
        os.write(2, f"wgpu-lora: {message}\n".encode())
    finally:
        os._exit(128 + number)


def _leave(code: int) -> NoReturn:
    """Ends with this code. Python's own way out has moments in which a signal decides it, and a KeyboardInterrupt that
    was caught long ago may."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
