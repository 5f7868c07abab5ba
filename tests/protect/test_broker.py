"""The broker's decisions: nonces, sessions, progress, its log and its clock."""

from __future__ import annotations

import hashlib
import json
import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jwt
import pytest
from support.fuzz.mutators import of_json
from support.protect.brokers import JOB, Owner, Trainer
from support.protect.policies import digest

from wgpu_lora.errors import UserError
from wgpu_lora.protect.attestation import claims
from wgpu_lora.protect.broker import broker as decisions
from wgpu_lora.protect.broker import decision_log
from wgpu_lora.protect.broker.broker import Broker, BrokerRefusal, sign_progress
from wgpu_lora.protect.broker.decision_log import HEAD_FILE
from wgpu_lora.protect.broker.release_token import open_release, read_release
from wgpu_lora.protect.evidence import dsse
from wgpu_lora.protect.sealed.keys import DataKey, SigningKey

INPUTS = int(os.environ.get("WGPU_LORA_FUZZ_INPUTS", "60"))


def rules(caught: Any) -> set[str]:
    return {failure["rule"] for failure in caught.value.failures}


def release(broker: Broker, trainer: Trainer) -> str:
    return broker.decide(trainer.evidence(broker.nonce()))


def refused(owner: Owner, evidence: Callable[[str], bytes], expected: str) -> None:
    """A rule, and nothing else, refuses evidence for a new nonce; nothing is released."""
    with owner.broker() as broker, pytest.raises(BrokerRefusal) as caught:
        broker.decide(evidence(broker.nonce()))
    assert rules(caught) == {expected}
    assert "released" not in owner.stages()


# -- nonces and sessions -----------------------------------------------------------------------------------------------


def test_the_key_is_released_to_the_session_that_attested(owner: Owner) -> None:
    trainer = Trainer(owner)
    with owner.broker() as broker:
        nonce = broker.nonce()
        evidence = trainer.evidence(nonce)
        token = broker.decide(evidence)
    opened = trainer.opened(token, evidence, nonce)
    assert opened.key.text() == owner.data.text()
    assert (opened.claims["sub"], opened.claims["min_rows"]) == (JOB, None)
    assert owner.stages() == ["nonce", "released"]
    assert owner.data.text() not in b"".join(owner.lines())
    decision = dsse.peek(owner.lines()[1].rstrip())["predicate"]["facts"]
    assert decision["evidence_sha256"] == hashlib.sha256(evidence).hexdigest()
    assert decision["policy"]["sha256"] == hashlib.sha256(owner.policy.read_bytes()).hexdigest()


def test_a_nonce_is_used_once_whatever_was_decided(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    with owner.broker() as broker:
        nonce = broker.nonce()
        for evidence, rule in (
            (Trainer(owner).evidence(nonce, iat=1), "nonce.seconds"),
            (Trainer(owner).evidence(nonce), "evidence.nonce"),
        ):
            with pytest.raises(BrokerRefusal) as caught:
                broker.decide(evidence)
            assert rules(caught) == {rule}
        nonce = broker.nonce()
        with monkeypatch.context() as patch:
            patch.setattr(decisions, "appraise", lambda *_, **__: 1 // 0)
            with pytest.raises(BrokerRefusal, match="ZeroDivisionError"):
                broker.decide(Trainer(owner).evidence(nonce))
        with pytest.raises(BrokerRefusal, match=r"evidence\.nonce"):
            broker.decide(Trainer(owner).evidence(nonce))
        nonce = broker.nonce()
        broker.decide(Trainer(owner, "a").evidence(nonce))
    with owner.broker() as broker, pytest.raises(BrokerRefusal, match=r"evidence\.nonce"):  # after a restart, too
        broker.decide(Trainer(owner, "b").evidence(nonce))
    assert owner.stages().count("released") == 1


def test_nonces_of_others_and_expired_ones_are_refused(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    with owner.broker() as broker:
        first, second = broker.nonce(), broker.nonce()
        for nonce in ("", "a" * 64, None, 7, ["a" * 64], "A" * 64, "x" * 100_000):
            with pytest.raises(BrokerRefusal) as caught:
                broker.decide(Trainer(owner).evidence(nonce))  # type: ignore[arg-type]
            assert rules(caught) & {"evidence.nonce", "evidence"}
        monkeypatch.setattr(time, "time", lambda: now + 301)
        with pytest.raises(BrokerRefusal, match=r"evidence\.nonce"):
            broker.decide(Trainer(owner).evidence(first))
    with owner.broker() as broker, pytest.raises(BrokerRefusal, match=r"evidence\.nonce"):  # while it did not run
        broker.decide(Trainer(owner).evidence(second))
    assert "released" not in owner.stages()


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

        threads = [threading.Thread(target=ask, args=(statement,)) for statement in evidence]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum("evidence.nonce" in outcome for outcome in outcomes) == 5
    assert owner.stages().count("released") == 1


def test_evidence_that_does_not_fit_is_refused(owner: Owner, capfd: pytest.CaptureFixture[str]) -> None:
    trainer, thief = Trainer(owner), Trainer(owner)

    def of_thief(nonce: str) -> bytes:
        """Its wrapped key could be opened with the thief's, if it were accepted."""
        stated = trainer.claims(nonce)
        stated["keys"]["recipient"] = thief.keys.data.recipient
        return claims.attest(stated, thief.keys, quote=False)

    def of_anybody(nonce: str) -> bytes:
        open_to_all = Trainer(owner)
        open_to_all.keys.data.recipient = (
            "age1qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq5cu47z"  # of low order
        )
        return open_to_all.evidence(nonce)

    def swapped(nonce: str) -> bytes:
        fields, other = (json.loads(trainer.evidence(nonce, iat=int(time.time()) - n)) for n in (0, 1))
        return json.dumps({**fields, "payload": other["payload"]}, separators=(",", ":")).encode()

    def job(nonce: str, **changed: Any) -> bytes:
        return trainer.evidence(nonce, job={**trainer.claims(nonce)["job"], **changed})

    for evidence in (of_thief, of_anybody, swapped):
        refused(owner, evidence, "evidence")
    assert "panicked" not in capfd.readouterr().err
    refused(owner, lambda nonce: job(nonce, recipients=[trainer.keys.data.recipient]), "release.recipients")
    for name in ("", "x" * 201, "a\nb", "\x1b[2J", 7, None, ["a"]):
        refused(owner, lambda nonce, name=name: job(nonce, name=name), "job.name")
    for data in (b"", b"{}", b"\xff\xfe", b"[" * 5000, b'{"payload": 1}', b"null", b"0" * 100_000):
        refused(owner, lambda nonce, data=data: data, "evidence")
        with owner.broker() as broker, pytest.raises(BrokerRefusal) as caught:
            broker.progress(data)
        assert (rules(caught), caught.value.status) == ({"report"}, 400)
    owner.write_policy('[training]\nmin_rows = 801\nmax_steps = 99\n[device]\nbackends = ["Metal"]\n')
    with owner.broker() as broker, pytest.raises(BrokerRefusal) as caught:
        release(broker, trainer)
    assert rules(caught) == {"training.min_rows", "training.max_steps", "device.backends"}
    assert len(caught.value.lines) == 4


def test_no_more_sessions_than_the_policy_allows_get_the_key_under_any_name(owner: Owner) -> None:
    owner.policy.write_text(owner.policy.read_text().replace("[release]\n", "[release]\nsessions = 2\n"))
    for number in range(3):
        with owner.broker() as broker:  # the count is in its log
            if number < 2:
                assert release(broker, Trainer(owner, job=f"job-{number}"))
                continue
            with pytest.raises(BrokerRefusal, match=r"release\.sessions"):
                release(broker, Trainer(owner, job=f"job-{number}"))


def test_open_nonces_are_limited(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "MAX_NONCES", 3)
    with owner.broker() as broker:
        for _ in range(3):
            broker.nonce()
        with pytest.raises(BrokerRefusal) as caught:
            broker.nonce()
        assert caught.value.status == 429
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 301)
        broker.nonce()


# -- progress ----------------------------------------------------------------------------------------------------------


def test_a_job_goes_on_from_where_it_was_or_later(owner: Owner) -> None:
    first = Trainer(owner)
    with owner.broker() as broker:
        with pytest.raises(BrokerRefusal, match=r"evidence\.resume"):  # it has not begun here
            release(broker, Trainer(owner, "renamed", resume=(3, digest(3))))
        release(broker, first)
        with pytest.raises(BrokerRefusal, match=r"evidence\.keys"):
            release(broker, first)
        for sequence in (3, 7, 7):  # the last one is asked twice
            broker.progress(sign_progress(JOB, sequence, digest(sequence), first.keys.signing))
        for sequence, head in ((5, digest(5)), (7, digest("other"))):
            with pytest.raises(BrokerRefusal, match="sequence"):
                broker.progress(sign_progress(JOB, sequence, head, first.keys.signing))
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
    for resume in (
        7, "7", [], {}, {"sequence": 7}, {"sequence": "7", "head": digest(7)}, {"sequence": True, "head": digest(7)},
        {"sequence": -1, "head": digest(7)}, {"sequence": 1 << 60, "head": digest(7)}, {"sequence": 7, "head": "7"},
        {"sequence": 7, "head": digest(7), "more": 1}, {"sequence": 7.5, "head": digest(7)},
    ):  # fmt: skip
        with owner.broker() as broker, pytest.raises(BrokerRefusal, match=r"evidence\.resume"):
            broker.decide(Trainer(owner).evidence(broker.nonce(), resume=resume))


def test_a_session_cannot_report_for_another_job_or_without_a_release(owner: Owner) -> None:
    first = Trainer(owner)
    with owner.broker() as broker:
        release(broker, first)
        release(broker, Trainer(owner, "other"))
        report, other = (json.loads(sign_progress(JOB, n, digest(n), first.keys.signing)) for n in (3, 4))
        report["signatures"] = other["signatures"]
        for signed in (
            sign_progress("other", 3, digest(3), first.keys.signing),
            sign_progress(JOB, 3, digest(3), Trainer(owner).keys.signing),
            json.dumps(report, separators=(",", ":")).encode(),
        ):
            with pytest.raises(BrokerRefusal, match="report"):
                broker.progress(signed)


def test_any_signed_statement_is_answered_or_refused_and_the_log_opens_again(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "MAX_NONCES", INPUTS + 2)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    rng, released, session = random.Random(5), 0, Trainer(owner)
    with owner.broker() as broker:
        nonce = broker.nonce()
        evidence = session.evidence(nonce)
        token = broker.decide(evidence)
        for number in range(INPUTS):
            nonce_, trainer = broker.nonce(), Trainer(owner, f"job {number}")
            stated = json.loads(of_json(json.dumps(trainer.claims(nonce_)).encode(), rng))
            with suppress(UserError):  # what cannot be signed
                statement = dsse.statement(claims.PROFILE, [("claims", claims.digest(stated))], {"claims": stated})
                broker.decide(dsse.sign(statement, trainer.keys.signing))
                released += 1
            report = sign_progress(JOB, number, digest(number), session.keys.signing)
            progress = json.loads(of_json(json.dumps(dsse.peek(report)).encode(), rng))
            with suppress(UserError):
                broker.progress(dsse.sign(progress, session.keys.signing))
    assert 0 < released < INPUTS  # some changes are allowed, such as a left-out figure of the host
    with owner.broker() as broker:
        broker.nonce()
    public, opened = owner.signing.public, session.opened(token, evidence, nonce)
    text = json.dumps({**opened.claims, "wrapped_key": "x"}).encode()
    for _ in range(3 * INPUTS):  # and any signed release is opened or refused
        other = jwt.PyJWS().encode(
            of_json(text, rng), owner.signing.key, "ES256", headers={"typ": "wgpu-lora-release+jwt"}
        )
        with suppress(UserError):
            read_release(other, public)
            open_release(other, public, opened.claims["evidence_sha256"], nonce, session.keys, opened.claims["iat"])


# -- the clock, the directory and the log ------------------------------------------------------------------------------


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


def test_what_a_broker_cannot_be_started_with(owner: Owner) -> None:
    with owner.broker() as broker:
        broker.nonce()
        with pytest.raises(UserError, match="Another broker uses"), owner.broker():
            pass
    signing, owner.signing = owner.signing, SigningKey.generate()
    with pytest.raises(UserError, match="not signed by this broker's key"), owner.broker():
        pass
    owner.signing, owner.data = signing, DataKey.generate()
    with pytest.raises(UserError, match="does not allow age1"), owner.broker():
        pass


def stopped(owner: Owner, words: str = "") -> None:
    with pytest.raises(UserError, match=words), owner.broker():
        pass


DAMAGE: dict[str, Callable[[list[bytes], int], list[bytes]]] = {
    "removed": lambda lines, at: [*lines[:at], *lines[at + 1 :]],
    "doubled": lambda lines, at: [*lines[: at + 1], *lines[at:]],
    "swapped": lambda lines, at: [*lines[: at - 1], lines[at], lines[at - 1], *lines[at + 1 :]],
    "changed": lambda lines, at: [*lines[:at], flipped(lines[at]), *lines[at + 1 :]],
    "foreign": lambda lines, at: [
        *lines[:at], dsse.sign(dsse.peek(lines[at].rstrip(b"\n")), SigningKey.generate()) + b"\n", *lines[at + 1 :]
    ],
}  # fmt: skip


def flipped(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]


def test_a_damaged_log_or_head_stops_the_broker(owner: Owner) -> None:
    with owner.broker() as broker:
        release(broker, Trainer(owner, "a"))
        release(broker, Trainer(owner, "b"))
    lines, head = owner.lines(), owner.state / HEAD_FILE
    for name, damage in DAMAGE.items():
        for at in range(1 if name == "swapped" else 0, 4):
            owner.log.write_bytes(b"".join(damage(lines, at)))
            stopped(owner, "decisions-1")
    for count in range(4):
        owner.log.write_bytes(b"".join(lines[:count]))
        stopped(owner, "had 4")
    owner.log.unlink()
    stopped(owner, "other files")
    owner.log.write_bytes(b"".join(lines))
    data = head.read_bytes()
    head.unlink()
    stopped(owner, "not the head")
    for wrong in (data[:-20], flipped(data), lines[3].rstrip(b"\n")):
        head.write_bytes(wrong)
        stopped(owner)
    head.write_bytes(data)
    with owner.broker() as broker:
        broker.nonce()


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


def test_a_log_of_several_parts_remembers_all_that_matters(parted: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(decision_log, "MAX_STATE_BYTES", 10)  # nothing is forgotten to make room
    with parted.broker() as broker, pytest.raises(UserError, match="too many jobs"):
        list(iter(broker.nonce, None))
    monkeypatch.undo()
    with parted.broker() as broker:
        broker.nonce()


def test_damage_in_any_part_stops_the_broker(parted: Owner) -> None:
    for path in parts(parted):
        data = path.read_bytes()
        lines = data.splitlines(keepends=True)
        for wrong in (b"", flipped(data), b"".join(lines[:-1]), b"".join(lines[1:]), data + lines[-1]):
            path.write_bytes(wrong)
            stopped(parted)
        path.unlink()
        stopped(parted, "other files")
        path.write_bytes(data)
    later = path.with_name(f"decisions-{len(parts(parted)) + 2}.jsonl")
    later.write_bytes(data)
    stopped(parted, "other files")
    later.unlink()
    with parted.broker() as broker:
        broker.nonce()


def test_a_crash_while_a_part_begins_is_repaired(parted: Owner) -> None:
    empty = parted.state / f"decisions-{len(parts(parted)) + 1}.jsonl"
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
    stopped(parted, "not known to head")
    for content in (lines[0], lines[0] + lines[1][:-1], lines[0][:-1]):  # the nonce was not handed out
        empty.write_bytes(content)
        head.write_bytes(before)
        with parted.broker() as broker, pytest.raises(BrokerRefusal, match=r"evidence\.nonce"):
            broker.decide(Trainer(parted, resume=(20, digest(20))).evidence(nonce))


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
    assert owner.stages() == ["nonce", "released", "refused", "repaired", "refused"]


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
