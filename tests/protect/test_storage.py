"""Sealed storage by itself: what it believes, and what it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from wgpu_lora.errors import UserError
from wgpu_lora.protect.evidence.run_evidence import NAME as LOG
from wgpu_lora.protect.evidence.run_evidence import EvidenceLog
from wgpu_lora.protect.runs.sealed_storage import SealedStorage
from wgpu_lora.protect.sealed.keys import DataKey, SessionKeys
from wgpu_lora.train.run import run_checkpoint
from wgpu_lora.train.run.checkpoint_store import EVIDENCE

KEY = DataKey.generate()


def start_session(run: Path) -> tuple[EvidenceLog, SessionKeys]:
    keys = SessionKeys.generate()
    log = EvidenceLog.resume(run, keys) if (run / LOG).exists() else EvidenceLog.start(run, keys, str(run))
    log.attested(b"evidence")
    return log, keys


def storage_in(run: Path) -> SealedStorage:
    log, keys = start_session(run)
    return SealedStorage(run, [KEY.recipient], KEY, keys, log)


def saved(storage: SealedStorage, place: Path, step: int, text: str = "weights") -> None:
    metadata = {"step": step, "losses": {"train": 1.0, "held_out": None, "best": None}}
    storage.write_directory(place, {"metadata.json": json.dumps(metadata).encode(), "a": text.encode()})


def test_what_is_written_is_read_by_the_next_session(tmp_path: Path) -> None:
    steps = tmp_path / "checkpoints"
    first = storage_in(tmp_path)
    for step in (2, 4):
        saved(first, steps / f"step-{step}", step, f"weights {step}")
    saved(first, tmp_path / "best", 2)
    saved(first, tmp_path / "best", 4, "better")
    other = storage_in(tmp_path)
    other.check_newest()
    assert other.recover() == []
    assert [path.name for _, path in run_checkpoint.list_checkpoints(steps, storage=other)] == ["step-2", "step-4"]
    assert other.read(steps / "step-2" / "a") == b"weights 2"
    assert other.read(tmp_path / "best" / "a") == b"better"
    assert other.read(tmp_path / "best" / "a", 3) == b"bett"
    assert not other.is_file(steps / "step-2" / "b")
    with pytest.raises(UserError, match="holds no b"):
        other.read(steps / "step-2" / "b")
    assert b"weights" not in b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_an_initial_adapter_is_found_from_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the record of a run that is resumed elsewhere names it; and whatever is written meanwhile."""
    monkeypatch.chdir(tmp_path)
    log, keys = start_session(tmp_path)
    initial = {Path("initial.tar.age"): {"a": b"weights"}}
    storage = SealedStorage(tmp_path, [KEY.recipient], KEY, keys, log, initial)
    saved(storage, tmp_path / "checkpoints" / "step-2", 2)
    for path in (Path("initial.tar.age"), tmp_path / "initial.tar.age"):
        assert storage.read(path / "a") == b"weights"


def test_files_that_the_log_does_not_name_are_not_there(tmp_path: Path) -> None:
    storage = storage_in(tmp_path)
    saved(storage, tmp_path / "checkpoints" / "step-2", 2)
    planted = tmp_path / "checkpoints" / "step-9.tar.age"
    planted.write_bytes((tmp_path / "checkpoints" / "step-2.tar.age").read_bytes())
    assert run_checkpoint.latest_checkpoint(tmp_path, storage) == tmp_path / "checkpoints" / "step-2"


def test_a_run_goes_back_from_what_it_removes(tmp_path: Path) -> None:
    """After a step that was not finite, newer checkpoints are removed, and an older one is the newest again."""
    storage, steps = storage_in(tmp_path), tmp_path / "checkpoints"
    for step in (2, 4, 6):
        saved(storage, steps / f"step-{step}", step)
    storage.remove(steps / "step-2")  # of the oldest, as always: nothing to say
    storage.remove(steps / "step-6")
    other = storage_in(tmp_path)
    other.check_newest()
    assert run_checkpoint.latest_checkpoint(tmp_path, other) == steps / "step-4"
    entry = [entry for entry in other._log.entries if entry.stage == "checkpoint"][-1]
    assert entry.facts == {"step": 4, "removed": "checkpoints/step-6.tar.age"}


@pytest.mark.parametrize("removed", [(6, 4, 2), (4, 6)])
@pytest.mark.parametrize("writes", range(6))
def test_a_crash_while_a_run_goes_back(
    tmp_path: Path, removed: tuple[int, ...], writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was written before a crash, log and directory agree on what is the newest; what went stays away."""
    storage, steps = storage_in(tmp_path), tmp_path / "checkpoints"
    for step in (2, 4, 6):
        saved(storage, steps / f"step-{step}", step)
    was = {path.name: path.read_bytes() for path in steps.iterdir()}
    real, operations = {"append": EvidenceLog.append, "unlink": Path.unlink}, list[str]()

    def counted(name: str) -> Callable[..., Any]:
        def write(*args: Any, **named: Any) -> Any:
            if len(operations) == writes:
                raise KeyboardInterrupt
            operations.append(name)
            return real[name](*args, **named)

        return write

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(EvidenceLog, "append", counted("append"))
        patch.setattr(Path, "unlink", counted("unlink"))
        for step in removed:
            storage.remove(steps / f"step-{step}")
    for again in (False, True):  # and after somebody has put back what was removed
        for name in was if again else ():
            (steps / name).write_bytes(was[name])
        other = storage_in(tmp_path)
        other.recover()
        other.check_newest()
        lines = [entry for entry in other._log.entries if entry.stage == "checkpoint"]
        checkpoint = run_checkpoint.latest_checkpoint(tmp_path, other)
        expected = [f"checkpoints/{checkpoint.name}.tar.age"] if checkpoint else []
        assert [name for name, _ in lines[-1].subjects] == expected
        assert lines[-1].facts["step"] == (int(checkpoint.name.removeprefix("step-")) if checkpoint else 0)


@pytest.mark.parametrize("complete", [True, False])
def test_a_crash_between_the_log_and_the_rename(
    tmp_path: Path, complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, steps = storage_in(tmp_path), tmp_path / "checkpoints"
    saved(storage, steps / "step-2", 2)

    def crash(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if complete:
            patch.setattr(Path, "replace", crash)
        else:
            patch.setattr(EvidenceLog, "append", crash)
        with pytest.raises(KeyboardInterrupt):
            saved(storage, steps / "step-4", 4)
    other = storage_in(tmp_path)
    (leftover,) = other.recover()
    assert leftover.startswith("checkpoints/.step-4.tar.age.")
    other.check_newest()
    assert run_checkpoint.latest_checkpoint(tmp_path, other) == steps / ("step-4" if complete else "step-2")
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_log_has_the_name_that_plain_runs_look_for() -> None:
    assert EVIDENCE == LOG
