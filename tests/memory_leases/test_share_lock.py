"""The lock of a ledger: held only while the ledger is changed, and never by a thread that waits for it."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock

from wgpu_lora.memory_leases import Ledger
from wgpu_lora.memory_leases import ledger as module
from wgpu_lora.memory_leases.lease_queue import take


def collected_again() -> bool:
    """Whether garbage is collected, once other leases of this process, which are renewed meanwhile, let it be."""
    until = time.monotonic() + 30
    while not gc.isenabled() and time.monotonic() < until:
        time.sleep(0.001)
    return gc.isenabled()


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger("gpu", tmp_path)


def test_what_interrupts_the_taking_of_the_lock_does_not_keep_it(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: Ledger) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "_share_lock", interrupted)
        with pytest.raises(KeyboardInterrupt), ledger.changing():
            pass
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.0)
    with Ledger("gpu", ledger.directory).changing():
        pass
    assert collected_again()


def test_garbage_is_collected_while_another_process_has_the_lock(ledger: Ledger) -> None:
    """Leases and devices that are garbage would otherwise stay as long as any thread waits."""
    with FileLock(ledger.path.with_suffix(".lock")):
        waiting = [threading.Thread(target=_change, args=(ledger,), daemon=True) for _ in range(8)]
        for thread in waiting:
            thread.start()
        until, seen = time.monotonic() + 10, []
        while sum(seen) < 5 and time.monotonic() < until:
            seen.append(gc.isenabled())
            time.sleep(0.01)
        assert all(thread.is_alive() for thread in waiting)
    for thread in waiting:
        thread.join(10)
    assert sum(seen) >= 5
    assert collected_again()


def _change(ledger: Ledger) -> None:
    with Ledger("gpu", ledger.directory).changing():
        pass


def test_the_free_memory_is_asked_for_before_the_ledger_is_locked(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver may take seconds to say it, and others would wait."""
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.0)

    def free() -> int:
        with Ledger("gpu", ledger.directory).changing():
            return 10

    with take(ledger, 5, 10, "x", free=free):
        pass
