"""Whatever evidence, reports and releases say in properly signed statements, they are answered or refused."""

from __future__ import annotations

import json
import os
import random
from contextlib import suppress
from pathlib import Path

import jwt
import pytest
from support.brokers import JOB, Owner, Trainer
from support.fuzz.mutators import of_json
from support.policies import digest

from wgpu_lora.errors import UserError
from wgpu_lora.protect.attestation import claims
from wgpu_lora.protect.broker import broker as decide
from wgpu_lora.protect.broker.broker import BrokerRefusal, sign_progress
from wgpu_lora.protect.broker.release_token import open_release, read_release
from wgpu_lora.protect.evidence import dsse

INPUTS = int(os.environ.get("WGPU_LORA_FUZZ_INPUTS", "60"))


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Owner:
    monkeypatch.setattr(decide, "MAX_NONCES", INPUTS + 2)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return Owner(tmp_path)


def test_any_signed_statement_is_answered_or_refused_and_the_log_opens_again(owner: Owner) -> None:
    rng, released = random.Random(5), 0
    session = Trainer(owner)
    with owner.broker() as broker:
        broker.decide(session.evidence(broker.nonce()))
        for number in range(INPUTS):
            nonce, trainer = broker.nonce(), Trainer(owner, f"job {number}")
            stated = json.loads(of_json(json.dumps(trainer.claims(nonce)).encode(), rng))
            with suppress(UserError):  # what cannot be signed
                subject = [("claims", claims.digest(stated))]
                made = dsse.statement(claims.PROFILE, subject, {"claims": stated})
                signed = dsse.sign(made, trainer.keys.signing)
                with suppress(BrokerRefusal):
                    broker.decide(signed)
                    released += 1
            report = sign_progress(JOB, number, digest(number), session.keys.signing)
            said = json.loads(of_json(json.dumps(dsse.peek(report)).encode(), rng))
            with suppress(UserError):
                signed = dsse.sign(said, session.keys.signing)
                with suppress(BrokerRefusal):
                    broker.progress(signed)
    assert 0 < released < INPUTS  # some changes are allowed, such as a left-out figure of the host
    with owner.broker() as broker:
        broker.nonce()


def test_any_signed_release_is_opened_or_refused(owner: Owner) -> None:
    rng, trainer = random.Random(6), Trainer(owner)
    with owner.broker() as broker:
        nonce = broker.nonce()
        evidence = trainer.evidence(nonce)
        token = broker.decide(evidence)
    public = owner.signing.public
    release = trainer.opened(token, evidence, nonce)
    text = json.dumps(release.claims).encode()
    for _ in range(3 * INPUTS):
        other = jwt.PyJWS().encode(of_json(text, rng), owner.signing.key, "ES256")
        with suppress(UserError):
            read_release(other, public)
            found = open_release(
                other, public, release.claims["evidence_sha256"], nonce, trainer.keys, release.claims["iat"]
            )
            assert found.key.text() == owner.data.text()
