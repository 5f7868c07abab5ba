"""The ledger of a device: whose entries count, damage, its lock, and what the killed leave."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from support.processes.share import adapter, start, until

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.memory_leases import Ledger, LedgerEntry, device_key
from wgpu_lora.gpu.memory_leases import ledger as module
from wgpu_lora.gpu.memory_leases.lease_queue import take
from wgpu_lora.gpu.memory_leases.ledger import FORGET_SECONDS, dump, parse
from wgpu_lora.processes.process_identity import process_start


def lease(nbytes: int = 5, **facts: Any) -> LedgerEntry:
    """A lease of this process, but for these facts."""
    return replace(LedgerEntry.of_this_process(nbytes, "a test", holds=True), **facts)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger("gpu", tmp_path)


def fill(ledger: Ledger, *entries: LedgerEntry) -> None:
    """Writes entries as they are, dead ones too."""
    ledger.directory.mkdir(exist_ok=True)
    ledger.path.write_bytes(dump(list(entries)))


OTHER_USER = """
import os, sys
from pathlib import Path
from wgpu_lora.gpu.memory_leases.ledger import Ledger
from wgpu_lora.gpu.memory_leases.lease_queue import take
os.setgid(65534), os.setuid(65534)
with take(Ledger("gpu", Path(sys.argv[1])), 4, 10, "theirs"):
    print([(e.bytes, e.what) for e in Ledger("gpu", Path(sys.argv[1])).read()])
try:
    with take(Ledger("gpu", Path(sys.argv[1])), 5, 10, "too much"):
        pass
except Exception as error:
    print(error)
"""


@pytest.mark.skipif(os.name == "nt" or os.getuid() != 0, reason="needs root, who alone can be two users")
def test_users_share_a_directory_that_all_can_write() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:  # pytest's own is private
        Path(name).chmod(0o777)
        ledger = Ledger("gpu", Path(name))
        with take(ledger, 6, 10, "ours"):
            command = [sys.executable, "-c", OTHER_USER, name]
            process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert process.stdout.splitlines()[0] == "[(6, 'ours'), (4, 'theirs')]", process.stderr
            assert "6 by pid" in process.stdout.splitlines()[1]
        assert ledger.read() == []


def test_entries_are_kept(ledger: Ledger) -> None:
    assert ledger.read() == []
    leases = [lease(), lease(7, what="'quotes' and ümlaut")]
    with ledger.changing() as entries:
        entries.extend(leases)
    assert ledger.read() == leases
    assert [item.path for item in Ledger.all(ledger.directory)] == [ledger.path]


def test_a_change_that_fails_is_not_made(ledger: Ledger) -> None:
    fill(ledger, lease())
    before = ledger.path.read_bytes()
    with suppress(ZeroDivisionError), ledger.changing() as entries:
        entries.clear()
        raise ZeroDivisionError
    assert ledger.path.read_bytes() == before


# -- whose entries count ---------------------------------------------------------------------------------------------

ELSEWHERE = {"host": "elsewhere"}
LATE = time.time() - FORGET_SECONDS - 1


@pytest.mark.parametrize(
    ("facts", "dead"),
    [
        ({}, False),
        ({"renewed": 0.0}, False),  # suspended, or stopped: it has its memory still
        ({"pid": 1 << 30}, True),
        ({"started": 1}, True),  # the pid is another process's by now
        ({"boot_id": "another"}, True),
        (ELSEWHERE, False),
        (ELSEWHERE | {"pid": 1 << 30, "started": 1}, False),  # its pids mean nothing here
        (ELSEWHERE | {"renewed": LATE}, True),
    ],
)
def test_who_is_dead(ledger: Ledger, facts: dict[str, Any], dead: bool) -> None:
    entry = lease(**facts)
    fill(ledger, entry)
    with ledger.changing() as entries:
        assert entries == ([] if dead else [entry])
    assert len(ledger.read()) == (not dead)


def test_a_machine_that_shares_the_directory_has_a_device_of_its_own(ledger: Ledger) -> None:
    container = lease(6, host="elsewhere")
    fill(ledger, lease(100, host="elsewhere", boot_id="another"), container)
    with take(ledger, 4, 10, "fits beside the container's"):
        pass
    with pytest.raises(UserError, match=rf"6 by pid {container.pid} on elsewhere"), take(ledger, 5, 10, "does not"):
        pass
    assert len(ledger.read()) == 2


def test_a_process_that_ended_is_dead_before_anyone_asks_for_its_exit_code() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    began = process_start(child.pid)
    assert began
    child.send_signal(signal.SIGSTOP)
    assert process_start(child.pid) == began
    child.kill()
    until(lambda: process_start(child.pid) is None)
    child.communicate()


# -- damage ----------------------------------------------------------------------------------------------------------

DAMAGE = {
    "empty": b"",
    "no JSON": b"\x00\xff{",
    "truncated": dump([lease()])[:-20],
    "another schema": b'{"schema": 99, "entries": []}',
    "a list": b"[]",
    "no entries": b'{"schema": 1}',
    "an entry that is none": b'{"schema": 1, "entries": [3]}',
    "too deep": b"[" * 100_000,
    **{
        f"{name} = {value}": json.dumps({"schema": 1, "entries": [asdict(lease()) | {name: value}]}).encode()
        for name, value in [("bytes", -1), ("bytes", True), ("bytes", 1.5), ("pid", "1"), ("renewed", float("nan")),
                            ("since", None), ("holds", 1), ("more", 1)]
    },
    "one id twice": dump([lease(id="one"), lease(id="one")]),
}  # fmt: skip


@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE)
def test_damage_fails_closed_until_repaired(ledger: Ledger, content: bytes) -> None:
    ledger.path.write_bytes(content)
    with pytest.raises(UserError, match="damaged") as refused, take(ledger, 1, None, "a test"):
        pass
    assert str(ledger.path) in str(refused.value)
    assert "'wgpu-lora share repair'" in str(refused.value)
    assert ledger.path.read_bytes() == content
    repair = ledger.repair()
    assert repair
    assert repair.damaged.read_bytes() == content
    with take(ledger, 1, None, "a test"):
        pass


def test_repair_keeps_the_living(ledger: Ledger) -> None:
    living, waiting, dead, torn_lease = lease(), lease(holds=False), lease(started=1), lease()
    whole = dump([living, dead, waiting, torn_lease])
    assert ledger.repair() is None
    for number in (1, 2):
        content = whole[: whole.index(torn_lease.id.encode())]
        ledger.path.write_bytes(content)
        repair = ledger.repair()
        assert repair
        assert repair.entries == [living, waiting] == ledger.read()
        assert repair.damaged.name == f"gpu.json.damaged-{number}"
        assert repair.damaged.read_bytes() == content
    assert ledger.repair() is None


@pytest.mark.parametrize("what", ["directory", "ledger"])
def test_a_place_that_cannot_be_used_is_said(tmp_path: Path, what: str) -> None:
    if what == "directory":
        (tmp_path / "share").write_text("a file")
    else:
        (tmp_path / "share/gpu.json").mkdir(parents=True)
    with pytest.raises(UserError, match="WGPU_LORA_SHARE_DIR"), take(Ledger("gpu", tmp_path / "share"), 1, None, ""):
        pass


# -- files -----------------------------------------------------------------------------------------------------------


def test_the_lock_file_is_never_replaced(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = ledger.path.with_suffix(".lock")
    with take(ledger, 1, None, "a test"):
        first = lock.stat().st_ino
    ledger.path.write_text("damage")
    ledger.repair()
    assert lock.stat().st_ino == first
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.05)
    with FileLock(lock), pytest.raises(UserError, match="locked by another process"), ledger.changing():
        pass


def test_a_killed_holder_leaves_nothing_locked_and_its_memory_free(ledger: Ledger) -> None:
    leftover = ledger.directory / ".gpu.json.abcdefgh.tmp"
    leftover.write_bytes(b"half")  # of a killed writer
    child = start(ledger.directory, 10, 10)
    assert child.stdout
    assert child.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"held .*pid {child.pid}"), take(ledger, 1, 10, "a test"):
        pass
    child.kill()
    child.communicate()
    with take(ledger, 10, 10, "a test"):  # at once, which is within a renewal period
        assert len(parse(ledger.path.read_bytes())) == 1
        assert not leftover.exists()
    FileLock(ledger.path.with_suffix(".lock")).acquire(timeout=0)


# -- keys ------------------------------------------------------------------------------------------------------------


def test_a_key_is_a_physical_device() -> None:
    radv, proprietary = "AMD Radeon RX 6600 (RADV NAVI23)", "AMD Radeon RX 6600"
    cards = [
        adapter(index=0, name=radv),
        adapter(index=1, name=radv),
        adapter(index=2, name=proprietary, driver="AMD's own"),
        adapter(index=3, name=proprietary, backend="D3D12"),
        adapter(index=4, name="llvmpipe (LLVM 15.0.6, 256 bits)", kind="software"),
    ]
    keys = [device_key(card, cards) for card in cards]
    first, second = "discrete AMD Radeon RX 6600 0", "discrete AMD Radeon RX 6600 1"
    assert keys == [first, second, first, first, "software llvmpipe 0"]
    updated = adapter(index=0, name="llvmpipe (LLVM 19.1.0, 128 bits)", kind="software", driver="driver 2")
    assert device_key(updated, [updated]) == keys[-1]


def collected_again() -> bool:
    """Whether garbage is collected, once other leases of this process, which are renewed meanwhile, let it be."""
    until = time.monotonic() + 30
    while not gc.isenabled() and time.monotonic() < until:
        time.sleep(0.001)
    return gc.isenabled()


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
        until, gc_states = time.monotonic() + 10, []
        while sum(gc_states) < 5 and time.monotonic() < until:
            gc_states.append(gc.isenabled())
            time.sleep(0.01)
        assert all(thread.is_alive() for thread in waiting)
    for thread in waiting:
        thread.join(10)
    assert sum(gc_states) >= 5
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
