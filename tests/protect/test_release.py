"""Releases: who can open them, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt
import pyrage
import pytest
from support.protect.brokers import JOB, Owner, Trainer

from wgpu_lora.errors import UserError
from wgpu_lora.protect.attestation.claims import read_evidence
from wgpu_lora.protect.broker.release_token import (
    MAX_TOKEN,
    SLACK,
    TYPE,
    Release,
    ReleaseClaims,
    check_expired,
    make_release,
    open_release,
    read_release,
)
from wgpu_lora.protect.policies.appraisal import appraise
from wgpu_lora.protect.policies.policy import Policy
from wgpu_lora.protect.sealed.keys import DataKey, SessionKeys, SigningKey

NONCE = "n" * 43


@dataclass
class Made:
    owner: Owner
    trainer: Trainer
    token: str
    evidence_sha256: str
    now: float

    def open(self, token: str | None = None, **changed: Any) -> Release:
        values: dict[str, Any] = {
            "broker": self.owner.signing.public,
            "evidence_sha256": self.evidence_sha256,
            "nonce": NONCE,
            "keys": self.trainer.keys,
            "now": self.now,
            **changed,
        }
        return open_release(self.token if token is None else token, **values)

    def claims(self) -> dict[str, Any]:
        return dict(jwt.decode(self.token, options={"verify_signature": False}))

    def signed(self, kind: str | None = TYPE, **changed: Any) -> str:
        """The token with other claims, signed by the broker; `...` leaves one out."""
        claims = {name: value for name, value in {**self.claims(), **changed}.items() if value is not ...}
        return jwt.PyJWS().encode(json.dumps(claims).encode(), self.owner.signing.key, "ES256", headers={"typ": kind})


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Made:
    owner = Owner(tmp_path_factory.mktemp("owner"))
    owner.write_policy("[training]\nmin_rows = 10\nmax_steps = 200\n")
    trainer, policy, now = Trainer(owner), Policy.read(owner.policy), time.time()
    data = trainer.evidence(NONCE)
    evidence = read_evidence(data)
    result = appraise(evidence, policy, nonce=NONCE, now=now)
    token = make_release(evidence, result, policy, owner.data, owner.signing, now)
    return Made(owner, trainer, token, hashlib.sha256(data).hexdigest(), now)


def test_a_release_opens_for_its_session(session: Made) -> None:
    release = session.open(recipients=[session.owner.data.recipient])
    assert release.key.text() == session.owner.data.text()
    assert tuple(release.claims[name] for name in ("sub", "min_rows", "max_steps")) == (JOB, 10, 200)
    assert release.claims["exp"] == int(session.now + 3600)
    assert release.facts()["release_sha256"] == hashlib.sha256(session.token.encode()).hexdigest()
    assert "wrapped_key" not in release.facts()
    check_expired(release.claims, session.now + 3590)
    with pytest.raises(UserError, match="expired"):
        check_expired(release.claims, session.now + 3601)


def test_it_is_bound_to_everything_that_it_answers(session: Made) -> None:
    for changed, message in (
        ({"nonce": "m" * 43}, "eat_nonce"),
        ({"evidence_sha256": "0" * 64}, "evidence_sha256"),
        ({"broker": SigningKey.generate().public}, "not signed by this broker"),
        ({"keys": SessionKeys.generate()}, "aud"),
        ({"keys": SessionKeys(DataKey.generate(), session.trainer.keys.signing)}, "not encrypted to this session"),
        ({"now": session.now + 3601}, "expired"),
        ({"now": session.now - SLACK - 2}, "in the future"),
        ({"recipients": [session.trainer.keys.data.recipient]}, "not among the job's recipients"),
    ):
        with pytest.raises(UserError, match=message):
            session.open(**changed)


def test_only_the_brokers_algorithm_is_accepted(session: Made) -> None:
    public = session.owner.signing.public.pem
    head, body, _ = session.token.split(".")

    def part(value: Any) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    symmetric = f"{part({'alg': 'HS256', 'typ': 'JWT'})}.{body}"
    mac = base64.urlsafe_b64encode(hmac.digest(public.encode(), symmetric.encode(), "sha256")).rstrip(b"=").decode()
    for token in (f"{part({'alg': 'none'})}.{body}.", f"{symmetric}.{mac}", f"{head}.{body}.", f"{head}.{body}"):
        with pytest.raises(UserError):
            session.open(token)
        with pytest.raises(UserError):
            read_release(token, session.owner.signing.public)


def test_another_token_that_the_broker_signed_is_no_release(session: Made) -> None:
    assert session.open(session.signed()).claims["sub"]
    for kind in ("JWT", "at+jwt", None):
        with pytest.raises(UserError, match="not a release"):
            session.open(session.signed(kind))


def test_what_is_no_token_of_this_broker_is_refused(session: Made) -> None:
    public = session.owner.signing.public
    for at in range(0, len(session.token), 97):
        other = "A" if session.token[at] != "A" else "B"
        with pytest.raises(UserError):
            read_release(session.token[:at] + other + session.token[at + 1 :], public)
    for token in ("", ".", "..", "a.b.c", "é", "\ud800", "A" * (MAX_TOKEN + 1), "e30.e30.e30"):
        for broker in (None, public):
            with pytest.raises(UserError):
                read_release(token, broker)


def test_claims_must_be_there_with_their_types(session: Made) -> None:
    for name in set(ReleaseClaims.__annotations__) - {"min_rows", "max_steps"}:
        for wrong in (..., None, {} if name == "known" else [], 1.5, True):
            with pytest.raises(UserError):
                session.open(session.signed(**{name: wrong}))
    for wrong in ("7", 7.5, True):
        with pytest.raises(UserError):
            session.open(session.signed(max_steps=wrong))
    with pytest.raises(UserError, match=r"ear\.status"):
        session.open(session.signed(**{"ear.status": "contraindicated"}))
    with pytest.raises(UserError, match="iss"):
        session.open(session.signed(iss="another"))


def test_the_wrapped_key_must_be_the_one_that_is_named(session: Made) -> None:
    def wrapped(text: bytes) -> str:
        to = pyrage.x25519.Recipient.from_str(session.trainer.keys.data.recipient)
        return str(pyrage.encrypt(text, [to], armored=True).decode())

    nothing = "age identity"
    for text, message in ((DataKey.generate().text(), "not the one"), (b"no key", nothing), (b"", nothing)):
        with pytest.raises(UserError, match=message) as caught:
            session.open(session.signed(wrapped_key=wrapped(text)))
        assert "AGE-SECRET-KEY" not in str(caught.value).replace("starts with AGE-SECRET-KEY-1", "")


def test_claims_without_the_key_are_read_for_checks(session: Made) -> None:
    for broker in (None, session.owner.signing.public):
        claims = read_release(session.token, broker)
        assert claims["sub"] == JOB
        assert claims["policy"] == Policy.read(session.owner.policy).as_dict()
        assert "wrapped_key" not in claims
    old = session.signed(exp=5, iat=3)
    assert read_release(old, session.owner.signing.public)["exp"] == 5  # a check comes after the expiry


def test_nothing_is_made_for_evidence_that_failed(session: Made, tmp_path: Path) -> None:
    policy = Policy.read(session.owner.policy)
    evidence = read_evidence(session.trainer.evidence(NONCE))
    result = appraise(evidence, policy, nonce="another", now=session.now)
    with pytest.raises(ValueError, match="not passed"):
        make_release(evidence, result, policy, session.owner.data, session.owner.signing, session.now)
