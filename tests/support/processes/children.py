"""A child process that does as it is told, for the tests of child_process."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

from wgpu_lora.processes import child_process, seccomp

UNLIMITED = "WGPU_LORA_TEST_UNLIMITED"


def answer(message: Any) -> Any:
    match message:
        case "compute":
            while True:
                pass
        case "wait":
            time.sleep(1000)
        case "crash":
            os.kill(os.getpid(), signal.SIGABRT)
        case "leave":
            os._exit(3)
        case "take":
            blocks = []
            while True:
                blocks.append(bytearray(10 << 20))
                time.sleep(0.02)
        case "flood":
            return "a" * (2 << 20)
        case "print":
            print("to standard output", flush=True)
            os.write(1, b"to its descriptor\n")
        case "reach out":
            return [_refused(attempt) for attempt in (Path(__file__).read_bytes, os.fork, socket.socket)]
    return message


def _refused(attempt: Any) -> bool:
    try:
        attempt()
    except OSError:
        return True
    return False


def main() -> None:
    if UNLIMITED in os.environ:  # as on systems that limit nothing, where only the parent watches
        child_process.resource = None
        seccomp.load = os.getpid
        del signal.setitimer
    child_process.serve(answer)


def start_and_die() -> None:
    """Start a child, print its number, and leave it behind."""
    command = child_process.python_command(__name__, child_process.Limits(memory=1 << 30, seconds=60))
    child = child_process.ChildProcess(command)
    child.ask("hello")
    print(child.popen.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
