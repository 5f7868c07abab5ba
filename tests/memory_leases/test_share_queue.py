"""Holding and waiting: first come first served, nothing over-committed, nothing left behind by whoever goes."""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.processes.share import adapter, start, until
from support.sampling import FULL, seeds

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.memory_leases import Ledger, LedgerEntry, device_key
from wgpu_lora.gpu.memory_leases import lease_queue as module
from wgpu_lora.gpu.memory_leases.lease_queue import take


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger("gpu", tmp_path)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(module, "LAST_PAUSE", 0.02)


def queue(ledger: Ledger) -> list[str]:
    return [e.what for e in ledger.read() if not e.holds]


def test_what_is_held_is_freed_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WGPU_LORA_SHARE_DIR", str(tmp_path))
    card = adapter()
    monkeypatch.setattr("wgpu_lora.gpu.device_list.list_devices", lambda: [card])
    ledger = Ledger(device_key(card))
    with take(ledger, 6, 10, "one"), take(ledger, 4, 10, "two"):
        assert [(e.what, e.bytes, e.pid) for e in ledger.read()] == [("one", 6, os.getpid()), ("two", 4, os.getpid())]
    with pytest.raises(ZeroDivisionError), take(ledger, 10, 10, "one"):
        raise ZeroDivisionError
    assert ledger.read() == []


def test_refusals(ledger: Ledger) -> None:
    def refused(message: str, *arguments: Any, **more: Any) -> None:
        with pytest.raises(UserError, match=message), take(ledger, *arguments, **more):
            pytest.fail("given beyond the budget")

    refused(r"needs 11 bytes .* the budget is 10", 11, 10, "one", math.inf)
    assert not ledger.path.exists()  # it was never queued
    with take(ledger, 6, 10, "one"):
        pattern = rf"6 bytes are held \(6 by pid {os.getpid()} \(one\)\): queue for it with wait, .*share status"
        refused(pattern, 5, 10, "two")
        advice = {"advise": lambda free: f"run with less than {free} bytes"}
        refused(r"queue for it with wait, run with less than 4 bytes, or see", 5, 10, "two", **advice)
        with take(ledger, 500, None, "whose budget nobody knows"):
            pass
        with ledger.changing() as entries:
            entries.append(LedgerEntry.of_this_process(9, "first in the queue"))
        for budget in (10, None):
            refused("1 other run waits before it", 1, budget, "jumps")
    assert queue(ledger) == ["first in the queue"]


@pytest.mark.usefixtures("hasty")
def test_first_come_first_served(ledger: Ledger) -> None:
    order: list[str] = []

    def run(name: str, need: int) -> None:
        with take(ledger, need, 10, name, wait=60):
            order.append(name)

    threads = [
        threading.Thread(target=run, args=arguments) for arguments in (("large", 9), ("small", 2))
    ]  # not both at once
    with take(ledger, 5, 10, "stays"):
        with take(ledger, 5, 10, "goes"):
            for count, thread in enumerate(threads, 1):
                thread.start()
                until(lambda count=count: len(queue(ledger)) == count)
        time.sleep(0.2)  # there is room for the small one, but it came second
        assert not order
    for thread in threads:
        thread.join(60)
    assert order == ["large", "small"]
    assert ledger.read() == []


@pytest.mark.usefixtures("hasty")
def test_the_dead_do_not_keep_their_place(ledger: Ledger) -> None:
    with ledger.changing() as entries:
        entries.append(replace(LedgerEntry.of_this_process(9, "died"), started=1))
    with take(ledger, 1, 10, "next", wait=60):
        assert [e.what for e in ledger.read()] == ["next"]


def test_the_wait_ends_on_time(ledger: Ledger) -> None:
    with take(ledger, 6, 10, "one"):
        begin = time.monotonic()
        message = r"After 0.2 s of waiting, .* 6 bytes are held \(6 by pid .*wait longer"
        with pytest.raises(UserError, match=message), take(ledger, 5, 10, "two", wait=0.2):
            pass
        assert 0.2 <= time.monotonic() - begin < 1  # it does not sleep out the pause of a second
        assert queue(ledger) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_waiter_leaves_the_queue(ledger: Ledger, number: int) -> None:
    with take(ledger, 10, 10, "holder"):
        child = start(ledger.directory, 1, 10, wait=600)
        until(lambda: queue(ledger))
        child.send_signal(number)
        _, errors = child.communicate(timeout=60)
        assert child.returncode not in (0, -signal.SIGTERM), errors
        assert [e.what for e in ledger.read()] == ["holder"]  # as the file is, not as a next look would clean it


def test_a_holder_renews_and_comes_back_after_a_loss(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.02)
    with take(ledger, 6, 10, "one") as entry:
        until(lambda: ledger.read()[0].renewed > entry.renewed + 0.03)
        ledger.path.write_text("damage")
        time.sleep(0.1)  # renewals fail meanwhile
        assert ledger.repair()
        until(lambda: [e.id for e in ledger.read()] == [entry.id])
    time.sleep(0.1)
    assert ledger.read() == []


# -- contention: this file is also the program that contends ---------------------------------------------------------

WORKERS, UNITS = 8, 8
# Seconds, at most: long enough that most of the units are held, short enough that it is over in a minute.
HELD, BETWEEN, KILLS = 0.012, 0.02, 0.4


@contextmanager
def locked(file: Any, flags: int = fcntl.LOCK_EX) -> Iterator[None]:
    fcntl.flock(file, flags)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


class Units:
    """The memory itself: a unit is a file that only one process can lock, and that the kernel frees when that dies."""

    def __init__(self, directory: Path):
        self._gate = (directory / "gate").open("w")
        self._files = [(directory / f"unit-{n}").open("w") for n in range(UNITS)]

    def take(self, number: int, stack: ExitStack) -> bool:
        """Whether there were so many; nobody else takes any meanwhile."""
        with locked(self._gate):
            for file in self._files:
                try:
                    if number:
                        stack.enter_context(locked(file, fcntl.LOCK_EX | fcntl.LOCK_NB))
                        number -= 1
                except BlockingIOError:
                    continue
        return not number


def work(directory: Path, budget: int, slot: int, board: Any) -> None:
    """Takes and frees without end. The board has three numbers a worker: acquisitions, over-commits, holding."""
    chance, units, ledger = random.Random(os.getpid()), Units(directory), Ledger("gpu", directory)
    while True:
        need, wait = chance.randint(1, UNITS // 2), chance.choice([300, *[None] * 9])
        try:
            with take(ledger, need, budget, f"worker {slot}", wait), ExitStack() as stack:
                board[3 * slot + 2] = 1
                board[3 * slot + 1] += not units.take(need, stack)
                board[3 * slot] += 1
                time.sleep(chance.uniform(0, HELD))
                board[3 * slot + 2] = 0
        except UserError as error:
            if "cannot get" not in str(error):
                raise
        time.sleep(chance.uniform(0, BETWEEN))


def contend(directory: Path, budget: int, acquisitions: int) -> dict[str, Any]:
    """Keeps WORKERS processes at it, killing one at random, mostly a holder, again and again."""
    module.FIRST_PAUSE, module.LAST_PAUSE = 0.005, 0.01
    board = memoryview(mmap.mmap(-1, 24 * WORKERS)).cast("q")
    chance, begin, kills, holders = random.Random(seeds(1, "contention")[0]), time.monotonic(), 0, 0

    def spawn(slot: int) -> int:
        board[3 * slot + 2] = 0
        pid = os.fork()
        if not pid:
            try:
                work(directory, budget, slot, board)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        return pid

    def kill(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), "a worker failed by itself"

    pids = [spawn(slot) for slot in range(WORKERS)]
    while sum(board[0::3]) < acquisitions:
        time.sleep(chance.uniform(0, KILLS))
        owners = [slot for slot in range(WORKERS) if board[3 * slot + 2]]
        slot = chance.choice(owners or range(WORKERS))
        kill(pids[slot])
        kills, holders = kills + 1, holders + board[3 * slot + 2]
        pids[slot] = spawn(slot)
    for pid in pids:
        kill(pid)
    with (directory / "gpu.lock").open() as lock, locked(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
        pass  # an error if it were locked still
    with take(Ledger("gpu", directory), UNITS, UNITS, "all of it"):
        assert not list(directory.glob(".*.tmp"))
    return {
        "acquisitions": sum(board[0::3]),
        "over_commits": sum(board[1::3]),
        "kills": kills,
        "killed_holders": holders,
        "seconds": round(time.monotonic() - begin, 1),
    }


def contention(budget: int, acquisitions: int) -> dict[str, Any]:
    """The same in a process of its own: forking this one, with a device's threads in it, would not be safe."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # a disk's syncs would be most of the time
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        command = [sys.executable, __file__, directory, str(budget), str(acquisitions)]
        paths = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}  # what pytest found it with
        process = subprocess.run(
            command, env=os.environ | paths, capture_output=True, text=True, timeout=900, check=False
        )
    assert process.returncode == 0, process.stderr
    assert not process.stderr
    print(process.stdout)
    return json.loads(process.stdout)


@pytest.mark.slow
@pytest.mark.rare
def test_nothing_is_over_committed() -> None:
    acquisitions = 10_000 if FULL else 1000
    counts = contention(UNITS, acquisitions)
    assert counts["acquisitions"] >= acquisitions
    assert counts["over_commits"] == 0
    assert counts["killed_holders"] > acquisitions / 500


def test_the_check_would_notice() -> None:
    """As if the ledger let twice as much be held as there is."""
    assert contention(2 * UNITS, 200)["over_commits"] > 0


if __name__ == "__main__":
    print(json.dumps(contend(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
