"""Whatever allocates holds what it needs first: sized by its plan, beside others and what the system says is free."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cli import QWEN2, SMALL, flags, write_rows
from support.events import hearing
from support.models import save_golden_adapter
from support.processes.share import until
from support.sampling import sample

from wgpu_lora.cli.app import main
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.memory_leases import Budget, DeviceMemory, Ledger, LedgerEntry, claim, claims, device_key
from wgpu_lora.gpu.memory_leases.lease_queue import take
from wgpu_lora.gpu.verdicts import verdicts_of
from wgpu_lora.processes.process_identity import process_start

BRICKS = ["--brick", "rmsnorm", "--brick", "train_step"]
COMMANDS: dict[str, Callable[[Path], list[Any]]] = {
    "generate": lambda at: ["generate", "--model", "demo", "--prompt", "a", "--max-new-tokens", 2],
    "evaluate": lambda at: ["evaluate", *on(at), "--data", at / "rows.jsonl", "--max-length", 16],
    "evaluate an adapter": lambda at: [*COMMANDS["evaluate"](at), "--adapter", at / "adapter", "--compare"],
    "import": lambda at: ["import", QWEN2, "--output", at / "packed"],
    "finetune": lambda at: ["finetune", *flags(**SMALL, data=at / "rows.jsonl", output=at / "out"), *on(at)],
    "profile": lambda at: ["profile", *on(at), "--tokens", 16, "--rank", 4, "--rounds", 1],
    "bench": lambda at: [
        "bench",
        *BRICKS,
        "--shape",
        "tiny-qwen3",
        "--layers",
        1,
        "--tokens",
        16,
        "--time-limit",
        0.01,
    ],
    "max-batch": lambda at: ["bench", "max-batch", *on(at), "--tokens", 8, "--max-batch", 2],
}


def on(at: Path) -> list[str]:
    return ["--model", QWEN2]


@pytest.fixture
def at(tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WGPU_LORA_SHARE_DIR", str(tmp_path / "share"))
    monkeypatch.setattr(claims, "_DEVICE_CLAIMS", type(claims._DEVICE_CLAIMS)())  # what other tests left on the device
    write_rows(tmp_path / "rows.jsonl")
    save_golden_adapter("qwen2", tmp_path / "adapter")
    return tmp_path


@pytest.fixture
def ledger(at: Path, device: Device) -> Ledger:
    return Ledger(device_key(device.info))


@pytest.mark.parametrize("name", sample([*COMMANDS], 1 / 2))
def test_each_takes_what_it_needs_and_no_more(
    at: Path, device: Device, ledger: Ledger, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = name in ("profile", "max-batch") or name.startswith("bench")  # they open one
    monkeypatch.setattr("wgpu_lora.bench.device_ceilings.RUNS", 1)
    monkeypatch.setattr("wgpu_lora.bench.device_ceilings.COPY_BYTES", 1 << 22)
    surplus: list[int] = []
    real = Device.create_buffer

    def create(self: Device, nbytes: int, label: str = "") -> Any:
        buffer = real(self, nbytes, label)
        if nbytes > 4096:  # probes and staging for timers are not worth a lease
            surplus.append(sum(entry.bytes for entry in ledger.read()) - self.allocated)
        return buffer

    monkeypatch.setattr(Device, "create_buffer", create)
    assert main([str(argument) for argument in COMMANDS[name](at)]) in (0, 1)  # a contract may break on a busy machine
    assert surplus, "it allocated nothing"
    assert min(surplus) >= -4096, f"allocated {-min(surplus)} bytes more than it holds"  # words are rounded up
    if not own:
        assert sum(entry.bytes for entry in ledger.read()) == device.allocated


@pytest.mark.parametrize("name", ["generate", "evaluate", "import", "finetune", "profile", "bench"])
def test_each_is_refused_beside_others(
    at: Path,
    device: Device,
    ledger: Ledger,
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = device.allocated
    with take(ledger, 1 << 50, None, "somebody's run"):
        assert main([str(argument) for argument in COMMANDS[name](at)]) == 2
    err = capsys.readouterr().err
    assert "somebody's run" in err
    assert err.count("\n") == 1
    assert ("--wait" in err) == (name == "finetune")
    assert device.allocated - before < 1 << 20  # an adapter's at the most
    assert not (at / "packed").exists()


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int | None]:
    state: dict[str, int | None] = {"free": None}
    memory = lambda info: DeviceMemory(1 << 40, "a test", state["free"])  # noqa: E731
    monkeypatch.setattr(claims, "device_memory", memory)
    return state


@pytest.mark.parametrize(
    ("reported", "nbytes", "budget", "granted"),
    [
        (1000, 1001, None, False),
        (1000, 2000, Budget(None, "--memory-budget", stated=True), True),  # the user's own word stands
        (1 << 40, 1001, None, True),
        (None, 1 << 30, None, True),
    ],
)
def test_what_the_system_says_is_free_counts(
    at: Path,
    device: Device,
    free: dict[str, int | None],
    ledger: Ledger,
    reported: int | None,
    nbytes: int,
    budget: Budget | None,
    granted: bool,
) -> None:
    """Programs that take no lease are seen by what they leave."""
    free["free"] = reported
    refused = pytest.raises(UserError, match="the system reports 1,000 bytes as free")
    with nullcontext() if granted else refused, claim(device, nbytes, "x", *[budget] * bool(budget)):
        assert sum(entry.bytes for entry in ledger.read()) == device.allocated + nbytes


def test_claims_within_claims_and_what_stays(at: Path, device: Device, ledger: Ledger) -> None:
    base = device.allocated
    with suppress(ZeroDivisionError), claim(device, 1000, "outer"), claim(device, 500, "inner"):
        assert [(entry.bytes, entry.what) for entry in ledger.read()] == [(base + 1000, "outer")]
        raise ZeroDivisionError
    assert [entry.bytes for entry in ledger.read()] == [base] * bool(base)
    with ExitStack() as stack:
        stack.enter_context(claim(device, 1000, "job"))
        buffer = device.create_buffer(600)
    assert sum(entry.bytes for entry in ledger.read()) == base + 600
    assert ledger.read()[-1].what == claims.STAYS
    with claim(device, 100, "next"):
        assert sum(entry.bytes for entry in ledger.read()) == base + 700
    device.free(buffer)
    with claim(device, 10, "last"):
        pass
    assert sum(entry.bytes for entry in ledger.read()) == base


def test_a_device_that_is_gone_holds_nothing(at: Path) -> None:
    """And neither what is held nor what was found out about a device keeps it."""
    opened = Device()
    reference, ledger = weakref.ref(opened), Ledger(device_key(opened.info))
    assert verdicts_of(opened).device is opened
    with claim(opened, 1000, "x", advise=lambda free, device=opened: device.info.name):
        opened.create_buffer(600)
    assert sum(entry.bytes for entry in ledger.read()) >= 600
    del opened
    gc.collect()
    assert reference() is None
    until(lambda: not ledger.read(), 10)


def test_a_thread_that_waits_does_not_keep_another_from_ending(at: Path, device: Device, ledger: Ledger) -> None:
    budget = Budget(device.allocated + 1500, "a test", stated=True)
    waits: list[int] = []
    got = threading.Event()
    with claim(device, 0, "what is there"):
        pass

    def other() -> None:
        with claim(device, 1000, "other", budget, 60, hearing(waiting=lambda *_: waits.append(1))):
            got.set()

    with take(ledger, 1000, None, "somebody's"):
        thread = threading.Thread(target=other)
        thread.start()
        until(lambda: waits)
        with claim(device, 0, "one", budget):
            pass
    thread.join(60)
    assert got.is_set()


def test_what_others_were_granted_just_now_counts(
    at: Path, device: Device, ledger: Ledger, free: dict[str, int | None]
) -> None:
    """It is not allocated yet, so the system still calls it free."""
    free["free"] = device.allocated + 10_000
    theirs = replace(
        LedgerEntry.of_this_process(8000, "theirs", holds=True), pid=os.getppid(), started=process_start(os.getppid())
    )
    with ledger.changing() as entries:
        entries.append(theirs)
    with pytest.raises(UserError, match="the system reports"), claim(device, 3000, "x"):
        pass
    with ledger.changing() as entries:
        entries[:] = [replace(theirs, since=theirs.since - 60)]
    with claim(device, 3000, "x"):
        pass
