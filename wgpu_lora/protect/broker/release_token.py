"""Releases: the broker's answer to evidence that passes its policy.

A release is an attestation result in the sense of RATS (RFC 9334), as a JSON Web Token (RFC 7519) that the broker signs
with ES256 (RFC 7518). Beside the registered claims it has `eat_nonce` (RFC 9711), `ear.status` (draft-ietf-rats-ear)
and the data key, encrypted with age (age-encryption.org/v1) to the ephemeral key that the evidence binds. Only that
session can open it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jwt
import pyrage
from typing_extensions import TypedDict  # pydantic reads that of `typing` from Python 3.12 on

from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import sha256
from wgpu_lora.files.typed_json import Count, read_as
from wgpu_lora.protect.attestation.claims import Evidence
from wgpu_lora.protect.policies.appraisal import Appraisal
from wgpu_lora.protect.policies.policy import Policy
from wgpu_lora.protect.sealed.age_streams import parse_recipient
from wgpu_lora.protect.sealed.keys import DataKey, PublicKey, SessionKeys, SigningKey

ALGORITHM = "ES256"
TYPE = "wgpu-lora-release+jwt"  # explicit typing (RFC 8725, 3.11): no other token of this key is a release
MAX_TOKEN = 32 << 10  # characters; a release has 3,000
SLACK = 120.0  # seconds between the clocks of broker and trainer
AFFIRMING = "affirming"


class LogLine(TypedDict):
    sequence: int
    head: str


ReleaseClaims = TypedDict(
    "ReleaseClaims",
    {
        "iss": str,  # keyid of the broker
        "aud": str,  # keyid of the session
        "sub": str,  # the job's name
        "jti": str,
        "iat": Count,
        "exp": Count,
        "eat_nonce": str,
        "ear.status": str,
        "evidence_sha256": str,
        "recipient": str,  # of the data key
        "wrapped_key": str,
        "policy": dict[str, Any],
        "known": list[LogLine],  # of the job's evidence log
        "min_rows": Count | None,
        "max_steps": Count | None,
    },
)


@dataclass
class Release:
    """An opened release.

    Attributes:
        token: the release as it was signed. key: the data key.
        claims: without the key; `exp` is when the data key must no longer be used to begin a session, in seconds since
            1970; `min_rows` and `max_steps` are limits of the policy, to be kept by the trainer.
    """

    token: str
    key: DataKey
    claims: dict[str, Any]

    def facts(self) -> dict[str, Any]:
        """What logs say about it."""
        return {**self.claims, "release_sha256": sha256(self.token.encode())}


def check_expired(claims: Mapping[str, Any], now: float) -> None:
    """Raise UserError if a release has expired, or is not yet valid. now: seconds since 1970."""
    late, early = now - claims["exp"], claims["iat"] - now
    if late >= 0:
        raise UserError(f"The release expired {late:,.0f} s ago: ask the broker again, or set this machine's clock.")
    if early > SLACK:
        raise UserError(
            f"The release was issued {early:,.0f} s in the future: set this machine's clock, or the broker's."
        )


def make_release(
    evidence: Evidence,
    appraisal: Appraisal,
    policy: Policy,
    data_key: DataKey,
    broker_key: SigningKey,
    now: float,
    lines: Sequence[tuple[int, str]] = (),
) -> str:
    """A token that releases the data key to the session of this evidence.

    Args:
        now: seconds since 1970. lines: of the job's evidence log, number and SHA-256.

    Raises:
        ValueError: the evidence has not passed the policy.
    """
    if not appraisal.passed:
        raise ValueError("the evidence has not passed")
    recipient = parse_recipient(evidence.recipient)
    nonce = evidence.claims["eat_nonce"]
    claims = {
        **answer_to(evidence.sha256, nonce, broker_key.public.keyid, evidence.signing.keyid),
        "sub": evidence.claims["job"]["name"],
        "jti": str(uuid.uuid4()),
        "iat": int(now),
        "exp": int(now + policy["release.seconds"]),
        "recipient": data_key.recipient,
        "wrapped_key": pyrage.encrypt(data_key.text(), [recipient], armored=True).decode(),
        "min_rows": policy["training.min_rows"],
        "max_steps": policy["training.max_steps"],
        "policy": policy.as_dict(),
        "known": [{"sequence": number, "head": head} for number, head in lines],
    }
    return jwt.encode(claims, broker_key.key, ALGORITHM, headers={"kid": broker_key.public.keyid, "typ": TYPE})


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
        keys: of the session. now: seconds since 1970. recipients: those of the job, among which the data key must be.

    Raises:
        UserError: it is not the broker's answer to this evidence, has expired, or its key does not open.
    """
    claims = _claims(token, broker)
    for name, value in answer_to(evidence_sha256, nonce, broker.keyid, keys.signing.public.keyid).items():
        if claims[name] != value:
            raise UserError(f"The release answers other evidence (its {name} differs): ask the broker again.")
    check_expired(claims, now)
    if recipients is not None and claims["recipient"] not in recipients:
        raise UserError(
            f"The released key is {claims['recipient']}, which is not among the job's recipients: add it to the job."
        )
    try:
        wrapped = claims.pop("wrapped_key").encode("ascii", "replace")
        key = DataKey.parse(pyrage.decrypt(wrapped, [keys.data.identity()]), "The released key")
    except pyrage.DecryptError:
        raise UserError("The released key was not encrypted to this session: ask the broker again.") from None
    if key.recipient != claims["recipient"]:
        key.wipe()
        raise UserError("The released key is not the one that the release names: ask the broker again.")
    return Release(token, key, claims)


def answer_to(evidence_sha256: str | None, nonce: str | None, broker: str, session: str) -> dict[str, Any]:
    """What a release states that answers this evidence. broker, session: keyids."""
    claims = {"iss": broker, "aud": session, "eat_nonce": nonce, "evidence_sha256": evidence_sha256}
    return {**claims, "ear.status": AFFIRMING}


def read_release(token: str, broker: PublicKey | None) -> dict[str, Any]:
    """The claims of a release without the wrapped key, whenever it expired; not verified if `broker` is None. Raises
    UserError: it is no release, or this broker did not sign it."""
    claims = _claims(token, broker)
    del claims["wrapped_key"]
    return claims


def _claims(token: str, broker: PublicKey | None) -> dict[str, Any]:
    if len(token) > MAX_TOKEN or not token.isascii():
        raise UserError(f"The release is not a JSON Web Token of at most {MAX_TOKEN:,} characters: get the original.")
    # Times are checked against the caller's `now`, the audience and issuer by `open_release`.
    unchecked = ("exp", "iat", "nbf", "aud", "iss", "sub", "jti")
    options: Any = {"verify_signature": broker is not None, **{f"verify_{name}": False for name in unchecked}}
    try:
        claims = jwt.decode(token, "" if broker is None else broker.crypto_key(), [ALGORITHM], options)
        kind = jwt.get_unverified_header(token).get("typ")
    except jwt.InvalidSignatureError:
        raise UserError("The release is not signed by this broker's key: get the original, or the right key.") from None
    except (jwt.PyJWTError, ValueError, RecursionError) as error:
        raise UserError(f"The release cannot be read ({error!s:.100}): get the original.") from None
    if kind != TYPE:
        raise UserError(f"The token is not a release, whose type is {TYPE}: get the broker's answer to this evidence.")
    read_as(ReleaseClaims, {"min_rows": None, "max_steps": None, **claims}, "The release", unknown="ignore")
    return claims


def missing_line(claims: Mapping[str, Any], log: Sequence[str]) -> int | None:
    """The number, from 0, of a line of the job's evidence log that the broker knew and that the log does not have.

    That evidence states a later line is not enough, since anybody can make an older log longer.

    Args:
        log: SHA-256 of the lines before the session.
    """
    for line in claims["known"]:
        number: int = line["sequence"]
        if not 0 <= number < len(log) or log[number] != line["head"]:
            return number
    return None
