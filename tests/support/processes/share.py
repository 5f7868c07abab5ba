"""What the tests of sharing a device share: adapters that are not there, and processes that hold or wait."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wgpu_lora.gpu.device_list import DeviceInfo

# Takes bytes of a budget, waiting if told to, says so, and keeps them until it is ended.
CHILD = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs have it ignored
from wgpu_lora.gpu.memory_leases.ledger import Ledger
from wgpu_lora.gpu.memory_leases.lease_queue import take
directory, need, budget, wait = sys.argv[1:]
with take(Ledger("gpu", Path(directory)), int(need), int(budget), "child", float(wait)):
    print("held", flush=True)
    time.sleep(600)
"""


def adapter(**facts: Any) -> DeviceInfo:
    """An adapter's facts, by default those of some discrete card."""
    defaults: dict[str, Any] = {
        "index": 0, "name": "Card", "driver": "driver 1", "vendor_id": 0, "backend": "Vulkan", "kind": "discrete",
        "features": (), "limits": {},
    }  # fmt: skip
    return DeviceInfo(**{**defaults, **facts})


def start(directory: Path, need: int, budget: int, wait: float = 0) -> subprocess.Popen[str]:
    """A process that takes `need` bytes of the ledger 'gpu'."""
    command = [sys.executable, "-c", CHILD, *map(str, (directory, need, budget, wait))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    """Waits for a condition, and fails where it does not come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)
