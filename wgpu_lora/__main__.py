"""`python -m wgpu_lora`, the same as `wgpu-lora`."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

from wgpu_lora.processes.signals import ENDING, discard_when_closed


def main() -> NoReturn:
    """Run the command line and exit the process."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    sys.stdout, sys.stderr = discard_when_closed(sys.stdout), discard_when_closed(sys.stderr)
    from wgpu_lora.cli.app import main as run

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


if __name__ == "__main__":
    main()
