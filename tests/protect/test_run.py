"""Protected runs from start to end, and what they refuse."""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.events import hearing
from support.protect.attesting import quick
from support.protect.brokers import serving
from support.protect.leaks import Pieces
from support.protect.protected import OPTIONS, SECRET, Hospital
from support.sampling import sample

from wgpu_lora.cli.app import main
from wgpu_lora.errors import UserError
from wgpu_lora.events import Events
from wgpu_lora.files.atomic import file_digest
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.protect.attestation.claims import attest, load_evidence
from wgpu_lora.protect.broker.broker import Broker
from wgpu_lora.protect.broker.broker_client import BrokerClient, RefusalError
from wgpu_lora.protect.check import CheckResult, check
from wgpu_lora.protect.evidence.run_evidence import EvidenceLog, read_log
from wgpu_lora.protect.runs import protected_job as jobs
from wgpu_lora.protect.runs import protected_run, protected_session
from wgpu_lora.protect.runs.protected_run import ProtectedRecord
from wgpu_lora.protect.sealed import archive
from wgpu_lora.protect.sealed.age_streams import unseal_bytes
from wgpu_lora.protect.sealed.keys import SessionKeys
from wgpu_lora.train.job import Job
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.resolve_options import resolve_options

URL = "http://127.0.0.1:1"
STEPS = [f"checkpoints/step-{step}.tar.age" for step in (2, 4, 6)]


class Direct:
    """The client of a broker in this process."""

    def __init__(self, broker: Broker):
        self.nonce, self.release, self.report = broker.nonce, broker.decide, broker.progress


class Ward:
    """A hospital, whose broker is in this process, and runs on the tests' device."""

    def __init__(self, place: Path, device: Device, monkeypatch: pytest.MonkeyPatch):
        self.hospital, self._device, self.monkeypatch = Hospital(place), device, monkeypatch
        self.place, self.owner = place, self.hospital.owner
        self.hospital.policy(place / "train.jsonl.age")
        self.messages: list[tuple[str, str]] = []

    def moved(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> Ward:
        """A copy of all files, anchors too."""
        shutil.copytree(self.place, place)
        shutil.copytree(self.place.with_name("data"), place.with_name("data"))
        monkeypatch.setenv("WGPU_LORA_DATA_DIR", str(place.with_name("data")))
        clone = copy.copy(self)
        clone.hospital, clone.owner = copy.copy(self.hospital), copy.copy(self.owner)
        clone.place = clone.hospital.place = place
        clone.monkeypatch, clone.messages, clone.hospital.owner = monkeypatch, [], clone.owner
        clone.owner.move(place)
        return clone

    def train(self, name: str = "job", path: Path | None = None, **options: Any) -> ProtectedRecord:
        """A session; the job's file is written unless there is one."""
        path = path or self.place / f"{name}.toml"
        if not path.exists():
            self.hospital.job(name, URL)
        with self.owner.broker() as broker:
            self.monkeypatch.setattr(protected_session, "BrokerClient", lambda *args: Direct(broker))
            return self.run(path, **options)

    def run(self, path: Path, **options: Any) -> ProtectedRecord:
        model = open_model(OPTIONS["model"], self._device, "nf4")
        try:
            return protected_run.finetune_protected(
                jobs.read_job(path), model=model, say=lambda *text: self.messages.append(text), **options
            )
        finally:
            model.unload()

    def check(self, name: str = "job") -> CheckResult:
        return check(self.place / name, self.owner.signing.public)

    def opened(self, sealed: Path) -> dict[str, bytes]:
        return archive.unpack(unseal_bytes(sealed.read_bytes(), self.owner.data))

    def stages(self, name: str = "job") -> list[str]:
        return [entry.stage for entry in read_log(self.place / name / "evidence.jsonl")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, device: Device) -> tuple[Ward, dict[str, ProtectedRecord]]:
    """A finished run, `whole`, and one that was interrupted after step 4, `job`; tests change copies of them."""
    place = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WGPU_LORA_DATA_DIR", str(place / "data"))
        quick(patch)
        ward = Ward(place / "ward", device, patch)
        records = {"whole": ward.train("whole"), "job": interrupted(ward)}
    return ward, records


@pytest.fixture
def again(trained: tuple[Ward, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ward:
    quick(monkeypatch)
    return trained[0].moved(tmp_path / "ward", monkeypatch)


@pytest.fixture
def ward(tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> Ward:
    quick(monkeypatch)
    return Ward(tmp_path / "ward", device, monkeypatch)


def at_step(number: int, act: Callable[[], Any], jobs_seen: list[Job[Any]] | None = None) -> protected_run.Watch:
    """Act once a step has been taken."""

    @contextmanager
    def watch(job: Job[Any]) -> Iterator[Events]:
        (jobs_seen if jobs_seen is not None else []).append(job)
        yield hearing(step=lambda result: act() if result.step == number else None)

    return watch


def interrupted(ward: Ward, step: int = 4, **options: Any) -> ProtectedRecord:
    record = ward.train(**options, watch=at_step(step, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert record.run.outcome == "interrupted"
    return record


def test_a_run_is_that_of_the_data_in_the_clear_and_proven(
    trained: tuple[Ward, dict[str, ProtectedRecord]], tmp_path: Path, device: Device
) -> None:
    ward, record = trained[0], trained[1]["whole"]
    lines = unseal_bytes((ward.place / "train.jsonl.age").read_bytes(), ward.owner.data).splitlines()
    rows = [json.loads(line) for line in lines]
    adapter, out = ward.opened(record.adapter), tmp_path / "opened"
    assert {"adapter_model.safetensors", "adapter_config.json", "model.sig", "README.md"} <= set(adapter)
    out.mkdir()
    for name, data in adapter.items():
        (out / name).write_bytes(data)
    checked = check(record.directory, ward.owner.signing.public, adapter=out)
    assert (checked.failures, checked.end) == ([], "finished")
    # The same rows in the clear.
    plain = tmp_path / "plain.jsonl"
    plain.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # A protected job's default rate does not depend on the model.
    options = {**OPTIONS, "data": str(plain), "output": str(tmp_path / "plain"), "learning_rate": 2e-4}
    model = open_model(OPTIONS["model"], device, "nf4")
    whole = prepare_job(TrainingArguments(**options), model).train()
    model.unload()
    assert whole.adapter_sha256 == record.run.adapter_sha256
    assert record.cleanup["complete"]
    assert not any("checkpoint" in part["what"] for part in record.cleanup["wiped"])
    assert {protected_run.DROPPED, protected_run.BASE} <= set(record.cleanup["not_wiped"])
    pieces = Pieces()
    pieces.text("the note", SECRET * 2)
    for row in rows:
        pieces.tokens("a row", row["input_ids"])
    assert pieces.leaks([ward.place, ward.place.with_name("data")]) == []


def test_resumed_after_sigterm_it_is_the_same_byte_for_byte(again: Ward, trained: tuple[Ward, Any]) -> None:
    assert trained[1]["job"].statement is None
    assert again.stages()[-2:] == ["interrupted", "wiped"]
    assert again.check().failures == []
    with pytest.raises(UserError, match="max_steps"):  # another job
        again.train(resume=True, max_steps=8)
    second = again.train(resume=True)
    assert second.run.adapter_sha256 == trained[1]["whole"].run.adapter_sha256
    assert again.check().failures == []
    assert again.stages().count("attested") == again.stages().count("wiped") == 2


def test_a_directory_that_is_in_use_or_has_another_run(again: Ward) -> None:
    with pytest.raises(UserError, match="already holds a protected run"):
        again.train("whole")
    with pytest.raises(UserError, match="no protected run"):
        again.train("other", resume=True)
    finetune_jobs: list[Job[Any]] = []
    again.train("whole", resume=True, watch=at_step(0, lambda: None, finetune_jobs))
    assert "resumed: already finished" in finetune_jobs[0].run.notes  # other options would be another job
    options = {**OPTIONS, "data": "rows.jsonl", "output": str(again.place / "whole")}
    with pytest.raises(UserError, match="protected run"):
        resolve_options({**options, "resume": True}, None, "here")
    with pytest.raises(UserError, match="protected run"):
        prepare_job(TrainingArguments(**options))
    with pytest.raises(UserError, match="Another process is writing"):
        again.train("other", watch=at_step(1, lambda: again.run(again.place / "other.toml")))
    (again.place / "third").mkdir()
    for name, words in {
        "run.json": "already holds an adapter",
        **{name: f"{name} exists already" for name in ("adapter.tar.age", "statement.json", "job.toml")},
    }.items():
        path = again.place / "third" / name
        path.write_text("{}")
        with pytest.raises(UserError, match=words):
            again.train("third")
        assert path.read_text() == "{}"
        assert [entry.name for entry in path.parent.iterdir() if entry.name != protected_run.LOCK] == [name]
        path.unlink()


def cut_log(run: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    path = run / "evidence.jsonl"
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def swap(first: Path, other: Path) -> None:
    data = first.read_bytes()
    first.write_bytes(other.read_bytes())
    other.write_bytes(data)


ATTACKS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "put back": (lambda run: shutil.copy(run / STEPS[0], run / STEPS[1]), "not the file that the evidence log names"),
    "removed": (lambda run: (run / STEPS[1]).unlink(), "is missing, which the evidence log names"),
    "swapped": (lambda run: swap(run / STEPS[0], run / STEPS[1]), "not the file that the evidence log names"),
    "flipped": (lambda run: flip(run / STEPS[1]), "not the file that the evidence log names"),
    "cut log": (lambda run: cut_log(run, lambda lines: lines[:-3]), "an older state"),
    "a line less": (lambda run: cut_log(run, lambda lines: [*lines[:4], *lines[5:]]), "evidence.jsonl"),
}


@pytest.mark.parametrize("attack", sample([*ATTACKS], 1 / 2))
def test_what_was_put_back_is_noticed(again: Ward, attack: str) -> None:
    change, words = ATTACKS[attack]
    change(again.place / "job")
    with pytest.raises(UserError, match=words):
        again.train(resume=True)


def lengthen(ward: Ward, *lines: tuple[str, dict[str, Any], list[tuple[str, str]]]) -> None:
    """A session whose keys nobody endorsed, at the end of the log: whoever can write to the directory can sign one."""
    directory, keys = ward.place / "job", SessionKeys.generate()
    log = EvidenceLog.resume(directory, keys)
    claims = load_evidence(directory / "evidence-1.json").claims | {
        "iat": int(time.time()),
        "eat_nonce": "made up by the attacker",
        "keys": {"recipient": keys.data.recipient, "signing": keys.signing.public.pem},
        "resume": {"sequence": log.sequence, "head": log.head},
    }
    log.attested(attest(claims, keys, quote=False))
    for line in lines:
        log.append(*line)


def test_an_older_directory_is_noticed_even_made_longer(again: Ward, tmp_path: Path) -> None:
    """By the anchor of this machine; elsewhere by the broker, the trainer and `check`."""
    ward, older = again, tmp_path / "older"
    shutil.copytree(ward.place / "job", older)
    interrupted(ward, 5, resume=True)

    def put_back() -> None:
        shutil.rmtree(ward.place / "job")
        shutil.copytree(older, ward.place / "job")

    put_back()
    with pytest.raises(UserError, match="an older state"):
        ward.train(resume=True)
    ward.monkeypatch.setenv("WGPU_LORA_DATA_DIR", str(tmp_path / "elsewhere"))
    with pytest.raises(UserError, match=r"evidence\.resume failed"):
        ward.train(resume=True)
    put_back()
    ward.monkeypatch.setenv("WGPU_LORA_DATA_DIR", str(tmp_path / "a third machine"))
    lengthen(ward, *[("leftovers", {}, [])] * 30)
    with pytest.raises(UserError, match=r"does not have the line .* that the broker was told of"):
        ward.train(resume=True)
    ward.monkeypatch.setattr(protected_session, "missing_line", lambda *arguments: None)  # a trainer that does not look
    ward.train(resume=True)
    assert any("the broker knew another line" in failure for failure in ward.check().failures)


def test_a_log_that_others_went_on_with_is_not_resumed(again: Ward, tmp_path: Path) -> None:
    ward = again
    forged = ward.place / "job" / STEPS[2]
    shutil.copy(ward.place / "job" / STEPS[0], forged)
    ward.monkeypatch.setenv("WGPU_LORA_DATA_DIR", str(tmp_path / "elsewhere"))
    lengthen(ward, ("checkpoint", {"step": 6, "loss": 1.0}, [(STEPS[2], file_digest(forged))]))
    with pytest.raises(UserError, match=r"(?s)not what the job's broker answered.*before any release"):
        ward.train(resume=True)


def test_data_that_change_after_the_attestation_are_refused(ward: Ward) -> None:
    def changed(self: Any, *args: Any) -> None:
        (ward.place / "train.jsonl.age").write_bytes(b"age-encryption.org/v1\n")

    ward.monkeypatch.setattr(protected_session.Session, "check_expired", changed)
    with pytest.raises(UserError, match="has changed since it was attested"):
        ward.train()
    assert ward.stages() == ["attested", "released", "failed", "wiped"]
    assert ward.check().failures == []


def test_a_release_that_expires_before_training(ward: Ward) -> None:
    calls: list[float] = []

    def now(self: Any) -> float:
        calls.append(0)
        return 2e9 if len(calls) > 2 else __import__("time").time()

    ward.monkeypatch.setattr(protected_session.Clock, "latest", now)
    with pytest.raises(UserError, match="expired"):
        ward.train()
    assert "checkpoint" not in ward.stages()
    assert ward.stages()[-2:] == ["failed", "wiped"]


def test_limits_of_the_policy_and_other_data(ward: Ward) -> None:
    for limit in ("min_rows = 13", "max_steps = 5"):
        ward.hospital.policy(ward.place / "train.jsonl.age", more=f"[training]\n{limit}\n")
        with pytest.raises(UserError, match=f"training.{limit.split()[0]} failed"):
            ward.train()
    ward.hospital.policy(ward.place / "train.jsonl.age", more="[training]\nmin_rows = 12\n")
    with pytest.raises(UserError, match="asks for at least 12"):
        ward.train("short", path=ward.hospital.job("short", URL, max_length=8, on_overflow="drop"))
    other = ward.hospital.seal("other", seed=5)
    for path in (other, other.with_name(f"{other.name}.json")):
        shutil.copy(path, ward.place / path.name.replace("other", "train"))
    with pytest.raises(UserError, match=r"data\.sha256 failed"):
        ward.train()
    assert not (ward.place / "job").exists()


def test_what_fails_is_cleaned_up(ward: Ward) -> None:
    def fail() -> None:
        raise RuntimeError(SECRET)

    finetune_jobs: list[Job[Any]] = []
    ward.monkeypatch.delenv("WGPU_LORA_NO_RUN_LOG", raising=False)
    with pytest.raises(RuntimeError):
        ward.train(watch=at_step(3, fail, finetune_jobs), run_log=True)
    rows = finetune_jobs[0].run.stream.prepared.rows
    assert not any(array.any() for row in rows for array in (row.input_ids, row.labels))
    assert ward.stages()[-2:] == ["failed", "wiped"]
    assert ward.check().failures == []
    pieces = Pieces()
    pieces.text("the message", SECRET)
    assert pieces.leaks([ward.place, Path(os.environ["WGPU_LORA_DATA_DIR"])]) == []
    resumed = ward.train(resume=True)
    assert resumed.run.outcome == "finished"
    assert ward.check().failures == []


def test_leftovers_of_a_killed_session_are_found(ward: Ward) -> None:
    """A checkpoint that the log names is completed; others go; an incomplete line of the log is cut off.

    It was killed in its cleanup, of which there is no record then.
    """

    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    with ward.monkeypatch.context() as patch:
        patch.setattr(EvidenceLog, "wiped", killed)
        with pytest.raises(KeyboardInterrupt):
            interrupted(ward)
    assert "session 1 ended without a cleanup record" in ward.check().failures
    place = ward.place / "job"
    for name in ("release-2.jwt", "tracking.json", "skipped_rows.jsonl.age"):
        (place / f".{name}.a1b2c3d4.tmp").write_bytes(b"half")
    digest = next(
        entry for entry in read_log(place / "evidence.jsonl") if entry.subjects[:1] and entry.subjects[0][0] == STEPS[1]
    ).subjects[0][1]
    (place / STEPS[1]).rename(place / "checkpoints" / f".step-4.tar.age.{digest[:16]}.tmp")
    (place / "checkpoints" / f".step-6.tar.age.{'0' * 16}.tmp").write_bytes(b"half")
    with (place / "evidence.jsonl").open("ab") as file:
        file.write(b'{"payload"')
    (place / ".cleanup.json.abcdefg8.tmp").write_bytes(b"{")
    ward.train(resume=True)
    leftovers = next(entry for entry in read_log(place / "evidence.jsonl") if entry.stage == "leftovers")
    assert len(leftovers.facts["files"]) == 2
    assert leftovers.facts["log_bytes"] == 10
    assert "leftovers" in dict(ward.messages)
    assert not list(place.rglob("*.tmp"))
    assert ward.check().failures == []


def test_anchors_that_cannot_be_written(ward: Ward) -> None:
    """Before the key is asked for, and, if that comes later, with what was open overwritten and nothing hidden."""
    file = ward.place / "file"
    file.write_text("")
    with ward.monkeypatch.context() as patch:
        patch.setenv("WGPU_LORA_DATA_DIR", str(file))
        with pytest.raises(UserError, match="anchors"):
            ward.train()
        assert not (ward.place / "job").exists()
        patch.setattr("wgpu_lora.protect.evidence.anchors.prepare", lambda: None)
        with pytest.raises(UserError, match="anchors"):
            ward.train()
    assert ward.stages()[-2:] == ["failed", "wiped"]
    assert ward.train().run.outcome == "finished"


def test_held_out_losses_do_not_fill_the_log(ward: Ward) -> None:
    heldout = ward.hospital.seal("held", 6, seed=3)
    ward.hospital.policy(ward.place / "train.jsonl.age", heldout)
    path = ward.hospital.job("job", URL, 'eval_data = "held.jsonl.age"', eval_steps=1)
    ward.monkeypatch.setattr("wgpu_lora.protect.evidence.signed_log.MAX_LOG_BYTES", 40_000)
    assert ward.train(path=path).run.outcome == "finished"
    losses = [e for e in read_log(ward.place / "job" / "evidence.jsonl") if e.stage == "evaluated" and not e.subjects]
    assert 0 < len(losses) < 7
    assert ward.check().failures == []


def test_a_killed_session_that_left_only_checkpoints_is_noticed(ward: Ward) -> None:
    with ward.monkeypatch.context() as patch:
        patch.setattr(protected_run.SessionEnd, "run", lambda self: None)
        interrupted(ward)
    for path in (ward.place / "job").glob("*.tmp"):
        path.unlink()
    ward.train(resume=True)
    assert "wiped nothing" in dict(ward.messages)["leftovers"]
    assert "leftovers" in ward.stages()
    assert ward.check().failures == []


def test_a_full_disk_leaves_no_part_of_a_checkpoint(ward: Ward) -> None:
    real = os.fsync

    def full(descriptor: int) -> None:
        if "step-4" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    ward.monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left"):
        ward.train()
    assert not list(ward.place.rglob("*.tmp"))
    assert ward.check().failures == []


def test_bad_rows_are_named_by_place_and_sealed(ward: Ward) -> None:
    plain = ward.place / "train.jsonl"
    rows = [{"input_ids": [n, n + 1, n + 2]} for n in range(8)] + [{"text": {"note": SECRET}}, {SECRET: 1}]
    plain.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for path in ("train.jsonl.age", "train.jsonl.age.json"):
        (ward.place / path).unlink()
    from wgpu_lora.protect.sealed.sealed_files import seal_path

    seal_path(plain, ward.place / "train.jsonl.age", [ward.owner.data.recipient])
    plain.unlink()
    ward.hospital.policy(ward.place / "train.jsonl.age")
    with pytest.raises(UserError, match=r"2 rows that cannot be used \(lines 9, 10\)") as refused:
        ward.train()
    assert SECRET not in str(refused.value.lines)
    ward.train("again", ward.hospital.job("again", URL, skip_bad_rows=True))
    skipped_rows = unseal_bytes((ward.place / "again" / "skipped_rows.jsonl.age").read_bytes(), ward.owner.data)
    assert SECRET.encode() in skipped_rows
    assert ward.check("again").failures == []
    pieces = Pieces()
    pieces.text("the note", SECRET * 2)
    assert pieces.leaks([ward.place]) == []


def test_held_out_rows_and_an_initial_adapter_are_sealed_too(ward: Ward) -> None:
    first = ward.train()
    heldout = ward.hospital.seal("held", 6, seed=3)
    initial = shutil.copy(first.adapter, ward.place / "initial.tar.age")
    own = 'eval_data = "held.jsonl.age"\ninit_adapter = "initial.tar.age"'
    ward.hospital.policy(ward.place / "train.jsonl.age", heldout, Path(initial))
    path = ward.hospital.job("second", URL, own, eval_steps=2)
    record = ward.train("second", path, watch=at_step(4, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert record.run.init_adapter_sha256 == first.run.adapter_sha256
    assert (ward.place / "second" / "best.tar.age").is_file()
    record = ward.train("second", path, resume=True)
    checked = ward.check("second")
    assert checked.failures == []
    assert "evaluated" in ward.stages("second")


def test_releases_by_files(ward: Ward) -> None:
    path = ward.hospital.job("job")
    files = ward.place / "exchange"
    with ward.owner.broker() as broker:
        nonce = broker.nonce()

    def owner() -> None:
        while not (files / "evidence.json").exists():
            pass
        with ward.owner.broker() as broker:
            (files / "part").write_text(broker.decide((files / "evidence.json").read_bytes()))
        (files / "part").rename(files / "release.jwt")

    ward.monkeypatch.setattr(protected_session, "POLL", 0.01)
    with pytest.raises(UserError, match="need nonce"):
        ward.run(path)
    waiting = threading.Thread(target=owner)
    waiting.start()
    record = ward.run(path, nonce=nonce)
    waiting.join()
    assert record.run.outcome == "finished"
    assert ward.check().failures == []


@pytest.mark.parametrize("resume", [False, True])
def test_a_wait_for_a_release_that_was_given_up_is_begun_anew(ward: Ward, resume: bool) -> None:
    path = ward.hospital.job("job")
    with ward.owner.broker() as broker, ward.monkeypatch.context() as patch:
        stopped = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: signal.raise_signal(signal.SIGINT)})
        patch.setattr(protected_session, "time", stopped)  # others may sleep
        with pytest.raises(KeyboardInterrupt):
            ward.run(path, nonce=broker.nonce())
    assert ward.stages() == ["attested", "interrupted", "wiped"]
    path.unlink()
    ward.train(resume=resume)
    assert ward.check().failures == []
    assert ward.stages().count("attested") == 1


def test_a_broker_that_cannot_be_reached_meanwhile_is_noted(ward: Ward) -> None:
    def fail(self: Any, signed: bytes) -> None:
        raise UserError("The broker cannot be reached: check that it runs.")

    ward.monkeypatch.setattr(Broker, "progress", fail)
    assert ward.train().run.outcome == "finished"
    assert "the broker was not told" in dict(ward.messages)["note"]


def test_a_session_ends_when_the_broker_refuses_its_reports(ward: Ward) -> None:
    """As it does when another session goes on with the job."""

    def older(self: Any, signed: bytes) -> None:
        raise RefusalError("It is not of the job's newest session: end the older one.")

    ward.monkeypatch.setattr(Broker, "progress", older)
    with pytest.raises(RefusalError, match="newest session"):
        ward.train()
    assert ward.stages()[-2:] == ["failed", "wiped"]
    ward.monkeypatch.undo()
    quick(ward.monkeypatch)
    assert ward.train(resume=True).run.outcome == "finished"
    assert ward.check().failures == []


def test_the_command_shows_no_message_of_an_unforeseen_error(
    ward: Ward, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        try:
            raise KeyError(SECRET)
        except KeyError as error:
            raise RuntimeError(SECRET) from error

    monkeypatch.setattr(protected_run, "finetune_protected", fail)
    assert main(["finetune", "--protected", str(ward.hospital.job("job", URL))]) == 1
    output = capsys.readouterr()
    assert "RuntimeError: a fault" in output.err
    assert "in fail" in output.err
    assert SECRET not in output.out + output.err


def test_the_command_with_a_broker_of_its_own(ward: Ward, capsys: pytest.CaptureFixture[str]) -> None:
    from support.cli import commands

    command = commands(capsys)
    ward.monkeypatch.setattr(protected_session, "BrokerClient", BrokerClient)
    with serving(ward.owner) as served:
        path = ward.hospital.job("job", served.url)
        process = command("finetune", "--protected", path, "--device", "0")
        assert process.code == 0, process.err
        for words in ("released", "adapter.tar.age", "all that can be overwritten was", "protect check"):
            assert words in process.out
        again = command("finetune", "--protected", path)
        assert again.code == 2
        assert "--resume" in again.err
    assert ward.check().failures == []
    refused = command("finetune", "--protected", ward.hospital.job("late", served.url))
    assert refused.code == 2
    assert "cannot be reached" in refused.err
    assert command("finetune", "--nonce", "x").code == 2
    assert command("finetune", "--protected", path, "--recipe", "demo").code == 2


def test_a_run_goes_back_from_weights_that_are_not_finite(ward: Ward, trained: tuple[Ward, Any]) -> None:
    """As a plain run, it returns to the step before, and resumes from there; the newer checkpoint is gone."""
    finetune_jobs: list[Job[Any]] = []

    def poison() -> None:
        norm = finetune_jobs[0].session.model.decoder.final_norm.storage.buffer
        ward._device.write(norm, np.full(norm.size // 4, np.nan, np.float32))

    path = ward.hospital.job("job", URL, save_steps=1)
    record = ward.train("job", path, watch=at_step(2, poison, finetune_jobs))
    assert (record.run.stop_reason, record.run.state.step, record.statement) == ("non-finite", 1, None)
    assert [path.name for path in (ward.place / "job" / "checkpoints").iterdir()] == ["step-1.tar.age"]
    assert ward.stages()[-2:] == ["failed", "wiped"]
    assert ward.check().failures == []
    resumed = ward.train("job", path, resume=True)
    assert resumed.run.adapter_sha256 == trained[1]["whole"].run.adapter_sha256
    assert ward.check().failures == []
