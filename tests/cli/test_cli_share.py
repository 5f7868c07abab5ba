"""wgpu-lora share: what it shows, frees and mends, and how it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cli import Run, commands
from support.processes.share import adapter

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.memory_leases import Ledger, LedgerEntry
from wgpu_lora.gpu.memory_leases.lease_queue import take
from wgpu_lora.gpu.memory_leases.ledger import dump


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """Of the one device there is."""
    monkeypatch.setenv("WGPU_LORA_SHARE_DIR", str(tmp_path))
    monkeypatch.setattr("wgpu_lora.gpu.device_list.list_devices", lambda: [adapter(kind="software")])
    return Ledger("software Card 0")


@pytest.fixture
def run(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> Run:
    return commands(capsys, "share")


def fill(ledger: Ledger, *entries: LedgerEntry) -> None:
    ledger.path.write_bytes(dump(list(entries)))


def entry(what: str, nbytes: int = 5, holds: bool = True, **facts: Any) -> LedgerEntry:
    return replace(LedgerEntry.of_this_process(nbytes, what, holds=holds), **facts)


def test_status(run: Run, ledger: Ledger) -> None:
    assert "held      0 bytes" in run("status").output()
    holder, dead, waiter = entry("holder", 6), entry("died", 7, started=1), entry("waiter", 8, holds=False)
    fill(ledger, holder, dead, waiter)
    (device,) = json.loads(run("status", "--json").output())
    assert device["device"] == "Card"
    assert device["held"] == 6
    assert device["budget"] > 0
    assert [(e["id"], e["alive"]) for e in device["leases"]] == [(holder.id, True), (dead.id, False)]
    assert [e["id"] for e in device["queue"]] == [waiter.id]
    out = run("status").output()
    for words in (("in use", "6", "holder"), ("ended", "7", "died"), ("waiting", "8", "waiter")):
        assert any(all(word in row for word in words) for row in out.splitlines()), out
    assert len(ledger.read()) == 3  # looking changes nothing


def test_status_of_a_device_that_is_not_here_now(run: Run, ledger: Ledger) -> None:
    fill(Ledger("discrete Gone 0"), entry("holder", 6))
    devices = json.loads(run("status", "--json").output())
    assert [(d["device"], d["held"]) for d in devices] == [("Card", 0), ("discrete-gone-0", 6)]


def test_release_of_the_dead(run: Run, ledger: Ledger) -> None:
    living, dead, later = entry("holder"), entry("died", 7, started=1), entry("died later", 8, started=1)
    fill(ledger, living, dead, later)
    assert "7 bytes of pid" in run("release", dead.id).output()
    fill(ledger, living, later)
    assert "(died later)" in run("release", "--dead").output()
    assert ledger.read() == [living]
    assert "all processes are alive" in run("release", "--dead").output()


def test_release_of_the_living_needs_force(run: Run, ledger: Ledger) -> None:
    living, waiter = entry("holder", 10), entry("waiter", holds=False)
    fill(ledger, living, waiter)
    assert "end it, or use --force" in run("release", living.id).refusal()
    assert "holds no memory but is waiting" in run("release", waiter.id, "--force").refusal()
    assert ledger.read() == [living, waiter]
    run("release", living.id, "--force").output()
    assert ledger.read() == [replace(living, bytes=0), waiter]


def test_release_forced_lasts_beyond_a_renewal(run: Run, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wgpu_lora.gpu.memory_leases.lease_queue.RENEW_SECONDS", 0.01)
    with take(ledger, 10, 10, "holder") as lease:
        run("release", lease.id, "--force").output()
        before = ledger.read()[0].renewed
        while ledger.read()[0].renewed == before:
            pass
        assert ledger.read()[0].bytes == 0
        with take(ledger, 10, 10, "next"):
            pass
    assert ledger.read() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["release"], "either a lease id"),
        (["release", "abc", "--dead"], "either a lease id"),
        (["release", "abc"], "There is no lease 'abc'"),
        (["release", ""], "is empty"),
        (["zork"], "No such command"),
    ],
)
def test_mistakes(run: Run, arguments: list[str], message: str) -> None:
    assert message in run(*arguments).refusal()


def test_repair(run: Run, ledger: Ledger) -> None:
    assert "no ledger is damaged" in run("repair").output()
    living = entry("holder")
    fill(ledger, living)
    ledger.path.write_bytes(ledger.path.read_bytes()[:-5])
    for command in ("status", "release --dead"):
        assert "'wgpu-lora share repair'" in run(*command.split()).refusal()
    with pytest.raises(UserError), take(ledger, 1, 10, "next"):
        pass
    output = run("repair").output()
    assert "kept 1 entry;" in output
    assert f"{ledger.path.name}.damaged-1" in output
    assert ledger.read() == [living]
    assert "no ledger is damaged" in run("repair").output()


def test_help(run: Run) -> None:
    assert all(name in run().output() for name in ("status", "release", "repair"))
