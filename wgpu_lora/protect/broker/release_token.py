"""Releases: the broker's answer to evidence that passes its policy.

A release is an attestation result in the sense of RATS (RFC 9334), as a JSON Web Token (RFC 7519) that the broker signs
with ES256 (RFC 7518). Beside the registered claims it has `eat_nonce` (RFC 9711), `ear.status` (draft-ietf-rats-ear)
and the data key, encrypted with age (age-encryption.org/v1) to the ephemeral key that the evidence binds. Only that
session can open it.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jwt
import pyrage

from wgpu_lora.errors import UserError
from wgpu_lora.protect.attestation.claims import Evidence
from wgpu_lora.protect.policies.policy import Policy
from wgpu_lora.protect.policies.result import Appraisal
from wgpu_lora.protect.sealed.age_streams import parse_recipient
from wgpu_lora.protect.sealed.keys import DataKey, PublicKey, SessionKeys, SigningKey

ALGORITHM = "ES256"
TYPE = "wgpu-lora-release+jwt"  # explicit typing (RFC 8725, 3.11): no other token of this key is a release
MAX_TOKEN = 32 << 10  # characters; a release has 3,000
SLACK = 120.0  # seconds between the clocks of broker and trainer
REQUIRED = {
    "iss": str,  # keyid of the broker
    "aud": str,  # keyid of the session
    "sub": str,  # the job's name
    "jti": str,
    "iat": int,
    "exp": int,
    "eat_nonce": str,
    "ear.status": str,
    "evidence_sha256": str,
    "recipient": str,  # of the data key
    "wrapped_key": str,
    "policy": dict,
    "known": list,  # lines of the job's evidence log
}
AFFIRMING = "affirming"


@dataclass
class Release:
    """An opened release.

    Attributes:
        token: the release as it was signed. key: the data key. job: the job's name.
        expires: when the data key must no longer be used to begin a session, in seconds since 1970.
        min_rows, max_steps: limits of the policy, to be kept by the trainer.
    """

    token: str
    key: DataKey
    job: str
    expires: float
    min_rows: int | None
    max_steps: int | None
    claims: dict[str, Any]

    def facts(self) -> dict[str, Any]:
        """What logs say about it."""
        public = {name: value for name, value in self.claims.items() if name != "wrapped_key"}
        return {**public, "release_sha256": token_digest(self.token)}

    def check_expired(self, now: float) -> None:
        """Raise UserError if the release has expired. now: seconds since 1970."""
        _check_times(self.claims, now)


def make_release(
    evidence: Evidence,
    appraisal: Appraisal,
    policy: Policy,
    data_key: DataKey,
    broker_key: SigningKey,
    now: float,
    known: Sequence[tuple[int, str]] = (),
) -> str:
    """A token that releases the data key to the session of this evidence, which must have passed the policy.

    Args:
        now: seconds since 1970.

    Raises:
        ValueError: it has not.
    """
    if not appraisal.passed:
        raise ValueError("the evidence has not passed")
    recipient = parse_recipient(evidence.recipient)
    claims = {
        "iss": broker_key.public.keyid,
        "aud": evidence.signing.keyid,
        "sub": evidence.claims["job"]["name"],
        "jti": str(uuid.uuid4()),
        "iat": int(now),
        "exp": int(now + policy.release_seconds),
        "eat_nonce": evidence.claims["eat_nonce"],
        "ear.status": AFFIRMING,
        "evidence_sha256": evidence.sha256,
        "recipient": data_key.recipient,
        "wrapped_key": pyrage.encrypt(data_key.text(), [recipient], armored=True).decode(),
        "min_rows": policy.min_rows,
        "max_steps": policy.max_steps,
        "policy": policy.as_dict(),
        "known": [{"sequence": number, "head": head} for number, head in known],
    }
    header = {"kid": broker_key.public.keyid, "typ": TYPE}
    return jwt.encode(claims, broker_key.key, ALGORITHM, headers=header)


def open_release(
    token: str,
    broker: PublicKey,
    evidence_sha256: str,
    nonce: str,
    keys: SessionKeys,
    now: float,
    recipients: Sequence[str] | None = None,
) -> Release:
    """Verify a release and decrypt its data key.

    Args:
        broker: the key that must have signed it. evidence_sha256, nonce: of the evidence that asked for it.
        keys: of the session. now: seconds since 1970.
        recipients: those of the job, among which the data key must be.

    Raises:
        UserError: it is not the broker's answer to this evidence, has expired, or its key does not open.
    """
    claims = _claims(token, broker)
    expected = {
        "iss": broker.keyid,
        "aud": keys.signing.public.keyid,
        "eat_nonce": nonce,
        "evidence_sha256": evidence_sha256,
        "ear.status": AFFIRMING,
    }
    for name, value in expected.items():
        if claims[name] != value:
            raise UserError(f"The release answers other evidence (its {name} differs): ask the broker again.")
    _check_times(claims, now)
    if recipients is not None and claims["recipient"] not in recipients:
        raise UserError(
            f"The released key is {claims['recipient']}, which is not among the job's recipients: add it to the job."
        )
    key = DataKey.parse(_unwrapped(claims["wrapped_key"], keys), "The released key")
    if key.recipient != claims["recipient"]:
        key.wipe()
        raise UserError("The released key is not the one that the release names: ask the broker again.")
    limits = claims.get("min_rows"), claims.get("max_steps")
    return Release(token, key, claims["sub"], float(claims["exp"]), *limits, claims)


def read_release(token: str, broker: PublicKey | None) -> dict[str, Any]:
    """The claims of a release without the wrapped key, whenever it expired; not verified if `broker` is None.

    Raises:
        UserError: it is no release, or this broker did not sign it.
    """
    claims = _claims(token, broker)
    return {name: value for name, value in claims.items() if name != "wrapped_key"}


def token_digest(token: str) -> str:
    """SHA-256 of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def _claims(token: str, broker: PublicKey | None) -> dict[str, Any]:
    if len(token) > MAX_TOKEN or not token.isascii():
        raise UserError(f"The release is not a JSON Web Token of at most {MAX_TOKEN:,} characters: get the original.")
    # Times are checked against the caller's `now`, the audience and issuer by `open_release`.
    unchecked = ("exp", "iat", "nbf", "aud", "iss", "sub", "jti")
    options: Any = {"verify_signature": broker is not None, **{f"verify_{name}": False for name in unchecked}}
    try:
        key = "" if broker is None else broker.crypto_key()
        claims = jwt.decode(token, key, [ALGORITHM], options)
        kind = jwt.get_unverified_header(token).get("typ")
    except jwt.InvalidSignatureError:
        raise UserError("The release is not signed by this broker's key: get the original, or the right key.") from None
    except (jwt.PyJWTError, ValueError, RecursionError) as error:
        raise UserError(f"The release cannot be read ({error!s:.100}): get the original.") from None
    if kind != TYPE:
        raise UserError(f"The token is not a release, whose type is {TYPE}: get the broker's answer to this evidence.")
    _check_types(claims)
    return claims


def missing_line(claims: Mapping[str, Any], log: Sequence[str]) -> int | None:
    """The number, from 0, of a line of the job's evidence log that the broker knew and that the log does not have.

    That evidence states a later line is not enough, since anybody can make an older log longer.

    Args:
        log: SHA-256 of the lines before the session.

    Raises:
        UserError: the claim names no lines.
    """
    for line in claims["known"]:
        if not isinstance(line, dict) or [type(line.get(name)) for name in ("sequence", "head")] != [int, str]:
            raise UserError("The release has no valid claim 'known': ask the broker again.")
        number: int = line["sequence"]
        if not 0 <= number < len(log) or log[number] != line["head"]:
            return number
    return None


def _check_types(claims: Mapping[str, Any]) -> None:
    optional = {name: int for name in ("min_rows", "max_steps") if claims.get(name) is not None}
    for name, kind in {**REQUIRED, **optional}.items():
        value = claims.get(name)
        if type(value) is not kind or (isinstance(value, int) and not 0 <= value < 1 << 53):
            raise UserError(f"The release has no valid claim {name!r}: ask the broker again.")


def _check_times(claims: Mapping[str, Any], now: float) -> None:
    if now >= claims["exp"]:
        raise UserError(
            f"The release expired {now - claims['exp']:,.0f} s ago: ask the broker again, or set this machine's clock."
        )
    if now < claims["iat"] - SLACK:
        raise UserError(
            f"The release was issued {claims['iat'] - now:,.0f} s in the future: set this machine's clock, or the "
            "broker's."
        )


def _unwrapped(wrapped: str, keys: SessionKeys) -> bytes:
    try:
        opened: bytes = pyrage.decrypt(wrapped.encode("ascii", "replace"), [keys.data.identity()])
    except pyrage.DecryptError:
        raise UserError("The released key was not encrypted to this session: ask the broker again.") from None
    return opened
