"""The broker's decisions: nonces, sessions, progress, its log and its clock."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.brokers import JOB, Owner, Trainer
from support.policies import digest

from wgpu_lora.errors import UserError
from wgpu_lora.protect.attestation.claims import attest
from wgpu_lora.protect.broker import broker as decide
from wgpu_lora.protect.broker import decision_log
from wgpu_lora.protect.broker.broker import Broker, BrokerRefusal, sign_progress
from wgpu_lora.protect.broker.decision_log import HEAD_FILE
from wgpu_lora.protect.evidence import dsse
from wgpu_lora.protect.sealed.keys import DataKey, SigningKey


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    return Owner(tmp_path)


def rules(caught: Any) -> set[str]:
    return {failure["rule"] for failure in caught.value.failures}


def stages(owner: Owner) -> list[str]:
    """Of the log's lines, whose signatures are verified."""
    return [dsse.verify(line.rstrip(b"\n"), owner.signing.public)["predicate"]["stage"] for line in owner.lines()]


def release(broker: Broker, trainer: Trainer) -> str:
    return broker.decide(trainer.evidence(broker.nonce()))


def test_the_key_is_released_to_the_session_that_attested(owner: Owner) -> None:
    trainer = Trainer(owner)
    with owner.broker() as broker:
        nonce = broker.nonce()
        evidence = trainer.evidence(nonce)
        token = broker.decide(evidence)
    opened = trainer.opened(token, evidence, nonce)
    assert opened.key.text() == owner.data.text()
    assert (opened.claims["sub"], opened.claims["min_rows"]) == (JOB, None)
    assert stages(owner) == ["nonce", "released"]
    assert owner.data.text() not in b"".join(owner.lines())
    decision = dsse.peek(owner.lines()[1].rstrip())["predicate"]["facts"]
    assert decision["evidence_sha256"] == hashlib.sha256(evidence).hexdigest()
    assert decision["policy"]["sha256"] == hashlib.sha256(owner.policy.read_bytes()).hexdigest()


def test_a_nonce_is_used_once_whatever_was_decided(owner: Owner) -> None:
    with owner.broker() as broker:
        nonce = broker.nonce()
        with pytest.raises(BrokerRefusal) as caught:
            broker.decide(Trainer(owner).evidence(nonce, iat=1))
        assert rules(caught) == {"nonce.seconds"}
        with pytest.raises(BrokerRefusal) as caught:
            broker.decide(Trainer(owner).evidence(nonce))
        assert rules(caught) == {"evidence.nonce"}
        nonce = broker.nonce()
        broker.decide(Trainer(owner, "a").evidence(nonce))
        with pytest.raises(BrokerRefusal, match=r"evidence\.nonce"):
            broker.decide(Trainer(owner, "b").evidence(nonce))
    with owner.broker() as broker, pytest.raises(BrokerRefusal, match=r"evidence\.nonce"):  # after a restart, too
        broker.decide(Trainer(owner, "b").evidence(nonce))
    assert stages(owner) == ["nonce", "refused", "refused", "nonce", "released", "refused", "refused"]


@pytest.mark.parametrize("nonce", ["", "a" * 64, None, 7, ["a" * 64], "A" * 64, "x" * 100_000])
def test_nonces_of_others_are_refused(owner: Owner, nonce: Any) -> None:
    with owner.broker() as broker:
        broker.nonce()
        with pytest.raises(BrokerRefusal) as caught:
            broker.decide(Trainer(owner).evidence(nonce))
        assert "evidence.nonce" in rules(caught) or "evidence" in rules(caught)
    assert "released" not in stages(owner)


def test_a_nonce_expires_while_the_broker_runs_and_while_it_does_not(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    with owner.broker() as broker:
        nonce, other = broker.nonce(), broker.nonce()
        monkeypatch.setattr(time, "time", lambda: now + 301)
        with pytest.raises(BrokerRefusal, match=r"evidence\.nonce"):
            broker.decide(Trainer(owner).evidence(nonce))
    with owner.broker() as broker, pytest.raises(BrokerRefusal, match=r"evidence\.nonce"):
        broker.decide(Trainer(owner).evidence(other))


def test_of_two_clients_at_once_with_one_nonce_one_gets_the_key(owner: Owner) -> None:
    outcomes: list[str] = []
    with owner.broker() as broker:
        nonce = broker.nonce()
        evidence = [Trainer(owner, f"job {number}").evidence(nonce) for number in range(6)]
        start = threading.Barrier(6)

        def ask(signed: bytes) -> None:
            start.wait()
            try:
                outcomes.append(broker.decide(signed))
            except BrokerRefusal as error:
                outcomes.append(str(error))

        threads = [threading.Thread(target=ask, args=(one,)) for one in evidence]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum("evidence.nonce" in outcome for outcome in outcomes) == 5
    assert stages(owner).count("released") == 1


def test_a_claim_changed_after_it_was_signed_is_refused_without_using_the_nonce(owner: Owner) -> None:
    trainer = Trainer(owner)
    with owner.broker() as broker:
        nonce = broker.nonce()
        fields = json.loads(trainer.evidence(nonce))
        other = json.loads(trainer.evidence(nonce, iat=int(time.time()) - 1))
        with pytest.raises(BrokerRefusal) as caught:
            broker.decide(json.dumps({**fields, "payload": other["payload"]}, separators=(",", ":")).encode())
        assert rules(caught) == {"evidence"}
        broker.decide(trainer.evidence(nonce))


def test_evidence_with_anothers_key_is_refused(owner: Owner) -> None:
    """The wrapped key could be opened with it, if it were accepted."""
    trainer, thief = Trainer(owner), Trainer(owner)
    with owner.broker() as broker:
        nonce = broker.nonce()
        claims = trainer.claims(nonce)
        claims["keys"]["recipient"] = thief.keys.data.recipient
        with pytest.raises(BrokerRefusal):
            broker.decide(attest(claims, thief.keys, quote=False))
    assert "released" not in stages(owner)


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff\xfe", b"[" * 5000, b'{"payload": 1}', b"null", b"0" * 100_000])
def test_malformed_evidence_is_refused_and_logged(owner: Owner, data: bytes) -> None:
    with owner.broker() as broker:
        with pytest.raises(BrokerRefusal) as caught:
            broker.decide(data)
        assert (rules(caught), caught.value.status) == ({"evidence"}, 400)
        with pytest.raises(BrokerRefusal):
            broker.progress(data)
    assert stages(owner) == ["refused", "refused"]


def test_no_more_sessions_than_the_policy_allows_get_the_key_under_any_name(owner: Owner) -> None:
    text = owner.policy.read_text()
    owner.policy.write_text(text.replace("[release]\n", "[release]\nsessions = 2\n"))
    for number in range(3):
        trainer = Trainer(owner, job=f"job-{number}")
        with owner.broker() as broker:  # the count is in its log
            evidence = trainer.evidence(broker.nonce())
            if number < 2:
                assert broker.decide(evidence)
                continue
            with pytest.raises(BrokerRefusal, match=r"release\.sessions"):
                broker.decide(evidence)


def test_a_recipient_that_everybody_could_open_is_refused(owner: Owner, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(owner)
    trainer.keys.data.recipient = "age1qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq5cu47z"  # of low order
    with owner.broker() as broker, pytest.raises(BrokerRefusal, match="evidence failed"):
        broker.decide(trainer.evidence(broker.nonce()))
    assert "panicked" not in capfd.readouterr().err


def test_a_stricter_policy_refuses_and_names_the_rules(owner: Owner) -> None:
    owner.write_policy('[training]\nmin_rows = 801\nmax_steps = 99\n[device]\nbackends = ["Metal"]\n')
    with owner.broker() as broker, pytest.raises(BrokerRefusal) as caught:
        release(broker, Trainer(owner))
    assert rules(caught) == {"training.min_rows", "training.max_steps", "device.backends"}
    assert len(caught.value.lines) == 4


def test_results_must_be_sealed_to_the_owner_too(owner: Owner) -> None:
    trainer = Trainer(owner)
    with owner.broker() as broker:
        nonce = broker.nonce()
        job = {**trainer.claims(nonce)["job"], "recipients": [trainer.keys.data.recipient]}
        with pytest.raises(BrokerRefusal, match=r"release\.recipients"):
            broker.decide(trainer.evidence(nonce, job=job))


def test_errors_of_the_appraisal_release_nothing_and_use_the_nonce(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    with owner.broker() as broker:
        nonce = broker.nonce()
        with monkeypatch.context() as patch:
            patch.setattr(decide, "appraise", lambda *_, **__: 1 // 0)
            with pytest.raises(BrokerRefusal, match="ZeroDivisionError"):
                broker.decide(Trainer(owner).evidence(nonce))
        with pytest.raises(BrokerRefusal, match=r"evidence\.nonce"):
            broker.decide(Trainer(owner).evidence(nonce))


def test_a_job_goes_on_from_where_it_was_or_later(owner: Owner) -> None:
    first = Trainer(owner)
    with owner.broker() as broker:
        release(broker, first)
        for sequence in (3, 7):
            broker.progress(sign_progress(JOB, sequence, digest(sequence), first.keys.signing))
        broker.progress(sign_progress(JOB, 7, digest(7), first.keys.signing))  # asked twice
        with pytest.raises(BrokerRefusal, match="sequence"):
            broker.progress(sign_progress(JOB, 5, digest(5), first.keys.signing))
        with pytest.raises(BrokerRefusal, match="sequence"):
            broker.progress(sign_progress(JOB, 7, digest("other"), first.keys.signing))
    with owner.broker() as broker:  # remembered by the log
        for resume in (None, (3, digest(3)), (6, digest(6)), (7, digest("other"))):
            with pytest.raises(BrokerRefusal, match=r"evidence\.resume"):
                release(broker, Trainer(owner, resume=resume))
        second = Trainer(owner, resume=(7, digest(7)))
        release(broker, second)
        with pytest.raises(BrokerRefusal, match="report"):
            broker.progress(sign_progress(JOB, 9, digest(9), first.keys.signing))
        broker.progress(sign_progress(JOB, 9, digest(9), second.keys.signing))
        release(broker, Trainer(owner, resume=(12, digest(12))))
        with pytest.raises(BrokerRefusal, match=r"evidence\.resume"):
            release(broker, Trainer(owner, resume=(9, digest(9))))


def test_a_session_cannot_report_for_another_job_or_without_a_release(owner: Owner) -> None:
    first = Trainer(owner)
    with owner.broker() as broker:
        release(broker, first)
        release(broker, Trainer(owner, "other"))
        for signed in (
            sign_progress("other", 3, digest(3), first.keys.signing),
            sign_progress(JOB, 3, digest(3), Trainer(owner).keys.signing),
        ):
            with pytest.raises(BrokerRefusal, match="report"):
                broker.progress(signed)
        report, other = (json.loads(sign_progress(JOB, n, digest(n), first.keys.signing)) for n in (3, 4))
        report["signatures"] = other["signatures"]
        with pytest.raises(BrokerRefusal, match="report"):
            broker.progress(json.dumps(report, separators=(",", ":")).encode())


def test_what_resumes_must_have_begun_here_and_has_new_keys(owner: Owner) -> None:
    with owner.broker() as broker:
        with pytest.raises(BrokerRefusal, match=r"evidence\.resume"):
            release(broker, Trainer(owner, "renamed", resume=(3, digest(3))))
        trainer = Trainer(owner)
        release(broker, trainer)
        with pytest.raises(BrokerRefusal, match=r"evidence\.keys"):
            release(broker, trainer)


def test_a_clock_set_back_stops_the_broker(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    with owner.broker() as broker:
        nonce = broker.nonce()
        monkeypatch.setattr(time, "time", lambda: now - 3600)
        for ask in (broker.nonce, lambda: broker.decide(Trainer(owner).evidence(nonce))):
            with pytest.raises(UserError, match="set back by 3,600 s"):
                ask()
    with pytest.raises(UserError, match="set back"), owner.broker():
        pass
    monkeypatch.setattr(time, "time", lambda: now + 1)
    with owner.broker() as broker:
        broker.decide(Trainer(owner).evidence(nonce))


def test_one_process_at_a_time_uses_a_state(owner: Owner) -> None:
    with owner.broker(), pytest.raises(UserError, match="Another broker uses"), owner.broker():
        pass
    with owner.broker() as broker:
        broker.nonce()


def test_a_key_that_the_policy_does_not_allow_is_not_served(owner: Owner) -> None:
    owner.data = DataKey.generate()
    with pytest.raises(UserError, match="does not allow age1"), owner.broker():
        pass


def test_open_nonces_are_limited(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "MAX_NONCES", 3)
    with owner.broker() as broker:
        for _ in range(3):
            broker.nonce()
        with pytest.raises(BrokerRefusal) as caught:
            broker.nonce()
        assert caught.value.status == 429
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 301)
        broker.nonce()


def written(owner: Owner) -> list[bytes]:
    with owner.broker() as broker:
        release(broker, Trainer(owner, "a"))
        release(broker, Trainer(owner, "b"))
    return owner.lines()


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("damage", ["removed", "doubled", "swapped", "changed", "foreign"])
def test_a_damaged_log_stops_the_broker(owner: Owner, at: int, damage: str) -> None:
    lines = written(owner)
    if damage == "removed":
        del lines[at]
    elif damage == "doubled":
        lines.insert(at, lines[at])
    elif damage == "swapped":
        lines[at], lines[at - 1] = lines[at - 1], lines[at]
    elif damage == "changed":
        middle = len(lines[at]) // 2
        lines[at] = lines[at][:middle] + bytes([lines[at][middle] ^ 1]) + lines[at][middle + 1 :]
    else:
        lines[at] = dsse.sign(dsse.peek(lines[at].rstrip(b"\n")), SigningKey.generate()) + b"\n"
    owner.log.write_bytes(b"".join(lines))
    with pytest.raises(UserError, match="decisions-1"), owner.broker():
        pass


@pytest.mark.parametrize("kept", range(4))
def test_a_truncated_log_stops_the_broker(owner: Owner, kept: int) -> None:
    lines = written(owner)
    owner.log.write_bytes(b"".join(lines[:kept]))
    with pytest.raises(UserError, match="had 4"), owner.broker():
        pass
    owner.log.unlink()
    with pytest.raises(UserError, match="other files"), owner.broker():
        pass


def test_a_head_that_is_missing_changed_or_anothers_stops_the_broker(owner: Owner, tmp_path: Path) -> None:
    written(owner)
    head = owner.state / HEAD_FILE
    data = head.read_bytes()
    head.unlink()
    with pytest.raises(UserError, match="not the head"), owner.broker():
        pass
    for wrong in (data[:-20], data[:100] + bytes([data[100] ^ 1]) + data[101:], owner.lines()[3].rstrip(b"\n")):
        head.write_bytes(wrong)
        with pytest.raises(UserError), owner.broker():
            pass
    head.write_bytes(data)
    with owner.broker() as broker:
        broker.nonce()


def test_another_signing_key_does_not_open_the_log(owner: Owner) -> None:
    written(owner)
    owner.signing = SigningKey.generate()
    with pytest.raises(UserError, match="not signed by this broker's key"), owner.broker():
        pass


@pytest.fixture
def parted(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> Owner:
    """A log of several parts, whose newest lines are a nonce that is still open and a report of line 20."""
    monkeypatch.setattr(decision_log, "PART_BYTES", 6000)
    with owner.broker() as broker:
        first = Trainer(owner)
        release(broker, first)
        for sequence in range(0, 21, 2):
            broker.progress(sign_progress(JOB, sequence, digest(sequence), first.keys.signing))
    return owner


def parts(owner: Owner) -> list[Path]:
    return sorted(owner.state.glob("decisions-*.jsonl"), key=lambda path: int(path.stem.split("-")[1]))


def test_a_log_of_several_parts_remembers_all_that_matters(parted: Owner) -> None:
    files = parts(parted)
    assert len(files) > 2
    with parted.broker() as broker:
        nonce = broker.nonce()
        with pytest.raises(BrokerRefusal, match=r"evidence\.resume"):
            release(broker, Trainer(parted, resume=(18, digest(18))))
        for _ in range(6):
            broker.nonce()
    assert len(parts(parted)) > len(files)
    with parted.broker() as broker:
        broker.decide(Trainer(parted, resume=(20, digest(20))).evidence(nonce))
        with pytest.raises(BrokerRefusal, match=r"evidence\.nonce"):
            broker.decide(Trainer(parted, "b").evidence(nonce))


def test_nothing_is_forgotten_to_make_room(parted: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_log, "MAX_STATE_BYTES", 10)
    with parted.broker() as broker, pytest.raises(UserError, match="too many jobs"):
        list(iter(broker.nonce, None))
    monkeypatch.undo()
    with parted.broker() as broker:
        broker.nonce()


def test_damage_in_any_part_stops_the_broker(parted: Owner) -> None:
    for path in parts(parted):
        data = path.read_bytes()
        middle = len(data) // 2
        lines = data.splitlines(keepends=True)
        for wrong in (
            b"",
            data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
            b"".join(lines[:-1]),
            b"".join(lines[1:]),
            data + lines[-1],
        ):
            path.write_bytes(wrong)
            with pytest.raises(UserError), parted.broker():
                pass
        path.unlink()
        with pytest.raises(UserError, match="other files"), parted.broker():
            pass
        path.write_bytes(data)
    last = parts(parted)[-1]
    later = last.with_name(f"decisions-{len(parts(parted)) + 2}.jsonl")
    later.write_bytes(data)
    with pytest.raises(UserError, match="other files"), parted.broker():
        pass
    later.unlink()
    with parted.broker() as broker:
        broker.nonce()


def test_a_crash_while_a_part_begins_is_repaired(parted: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    count = len(parts(parted))
    empty = parted.state / f"decisions-{count + 1}.jsonl"
    empty.touch()
    with parted.broker():
        assert not empty.exists()
    head = parted.state / HEAD_FILE
    with parted.broker() as broker:
        while not empty.exists():
            before = head.read_bytes()
            nonce = broker.nonce()
    lines = empty.read_bytes().splitlines(keepends=True)
    assert len(lines) == 2
    head.write_bytes(before)
    with pytest.raises(UserError, match="not known to head"), parted.broker():
        pass
    for kept in (lines[0], lines[0] + lines[1][:-1], lines[0][:-1]):  # the nonce was not handed out
        empty.write_bytes(kept)
        head.write_bytes(before)
        with parted.broker() as broker, pytest.raises(BrokerRefusal, match=r"evidence\.nonce"):
            broker.decide(Trainer(parted, resume=(20, digest(20))).evidence(nonce))


@pytest.mark.parametrize(
    "resume",
    [7, "7", [], {}, {"sequence": 7}, {"sequence": "7", "head": digest(7)}, {"sequence": True, "head": digest(7)},
     {"sequence": -1, "head": digest(7)}, {"sequence": 1 << 60, "head": digest(7)}, {"sequence": 7, "head": "7"},
     {"sequence": 7, "head": digest(7), "more": 1}, {"sequence": 7.0, "head": digest(7)}],
)  # fmt: skip
def test_what_names_no_line_is_refused(owner: Owner, resume: Any) -> None:
    """It would be remembered, and read again at the next start."""
    with owner.broker() as broker:
        release(broker, Trainer(owner))
        with pytest.raises(BrokerRefusal, match=r"evidence\.resume"):
            broker.decide(Trainer(owner).evidence(broker.nonce(), resume=resume))


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", "\x1b[2J", 7, None, ["a"]])
def test_names_of_jobs_are_as_the_log_has_them(owner: Owner, name: Any) -> None:
    trainer = Trainer(owner)
    with owner.broker() as broker:
        nonce = broker.nonce()
        with pytest.raises(BrokerRefusal, match=r"job\.name"):
            broker.decide(trainer.evidence(nonce, job={**trainer.claims(nonce)["job"], "name": name}))


def test_what_a_crash_leaves_is_repaired_and_nothing_is_released_twice(owner: Owner) -> None:
    """A crash may come before a line is whole, or between the line and the head."""
    with owner.broker() as broker:
        nonce = broker.nonce()
        head = (owner.state / HEAD_FILE).read_bytes()
        evidence = Trainer(owner).evidence(nonce)
        broker.decide(evidence)
    (owner.state / HEAD_FILE).write_bytes(head)  # the head of the line before
    with owner.broker() as broker, pytest.raises(BrokerRefusal, match=r"evidence\.nonce"):
        broker.decide(evidence)
    lines = owner.lines()
    owner.log.write_bytes(b"".join(lines) + lines[1][:-1])  # a line without its end
    with owner.broker() as broker, pytest.raises(BrokerRefusal, match=r"evidence\.nonce"):
        broker.decide(evidence)
    assert stages(owner) == ["nonce", "released", "refused", "repaired", "refused"]


def test_nothing_is_released_if_it_cannot_be_recorded(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with owner.broker() as broker:
        nonce = broker.nonce()
        evidence = Trainer(owner).evidence(nonce)
        with monkeypatch.context() as patch:
            patch.setattr("wgpu_lora.protect.evidence.signed_log.os.fsync", full)
            with pytest.raises(UserError, match="No space"):
                broker.decide(evidence)
        broker.decide(evidence)  # it was not decided
        nonce = broker.nonce()
        with monkeypatch.context() as patch:
            patch.setattr("wgpu_lora.protect.broker.decision_log.write_bytes_atomic", full)
            with pytest.raises(UserError, match="No space"):
                broker.decide(Trainer(owner, "b").evidence(nonce))
        with pytest.raises(UserError, match="start the broker again"):
            broker.nonce()
    with owner.broker() as broker, pytest.raises(BrokerRefusal, match=r"evidence\.nonce"):
        broker.decide(Trainer(owner, "b").evidence(nonce))
