"""Evidence about a session, in the sense of RATS (RFC 9334): claims by the names of the Entity Attestation Token (EAT,
RFC 9711), signed with the session's ephemeral key.

EAT's own claims are `eat_profile`, `eat_nonce`, `iat`, `swname` and `swversion`; the rest is the profile's:

    level         "self-reported" or "quoted", and level_note, what this means; no_quote: why there is no quote
    keys          the ephemeral public keys: recipient (age) and signing (P-256, PEM)
    package, wgpu, python, dependencies, process, kernel, environment   `measure`
    device        the device that is used
    base          the base model: sha256 of what `hashed` says, and config_sha256; all weights are in a run's statement
    job           name, sha256 (of its file), recipe_sha256, options, recipients, and data: the sealed files, each with
                  role, name, sha256, bytes and rows as its seal record states them, and teacher and reference adapters
    resume        sequence and head of the evidence log that the session goes on with; absent at a first start
    host          what keeps secrets off the disk

Digests are SHA-256 in lower-case hexadecimal. What is not known is absent.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyrage

from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import sha256
from wgpu_lora.files.installation import NAME
from wgpu_lora.files.json_files import read_bytes
from wgpu_lora.files.typed_json import typed
from wgpu_lora.protect.attestation import tpm
from wgpu_lora.protect.evidence import dsse
from wgpu_lora.protect.sealed.age_streams import parse_recipient
from wgpu_lora.protect.sealed.keys import PublicKey, SessionKeys

if TYPE_CHECKING:
    from wgpu_lora.gpu.device_list import DeviceInfo

PROFILE = "https://example.org/wgpu-lora/attestation/v1"  # EAT profile and in-toto predicate type
MAX_BYTES = 2 << 20  # of evidence; it takes 0.15 MB
NONCE = range(8, 89)  # characters, RFC 9711, 4.1
LEVELS = {
    "self-reported": "Measured and stated by the program that these claims describe: "
    "a changed program could state the same.",
    "quoted": "A TPM signed these claims' digest together with its PCRs, which say what the machine booted; the claims "
    "themselves were measured and stated by the program that they describe.",
}
HASHED = "names, types and shapes of all tensors; of each file its size and its first and last 64 KiB"


@dataclass(frozen=True)
class Evidence:
    """Evidence whose signature fits the key that it binds. Nothing is said yet about who has this key.

    Attributes:
        quote: the TPM's quote, verified: `tpm.verify`; None if the claims are self-reported.
        signing, recipient: the session's public keys.
        sha256: of the whole signed envelope.
    """

    claims: dict[str, Any]
    quote: dict[str, Any] | None
    signing: PublicKey
    recipient: str
    sha256: str


def gather(
    device: DeviceInfo | None,
    *,
    nonce: str,
    keys: SessionKeys,
    job: Any = None,
    base: Mapping[str, Any] | None = None,
    resume: tuple[int, str] | None = None,
    host: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The claims of a session. It reads all files of the package and its dependencies.

    Args:
        nonce: the verifier's, which shows that the claims are fresh. job: a `ProtectedJob`. base: `base_facts`.
        resume: sequence and head of the log. host: `HostProtection.facts`.

    Raises:
        UserError: the nonce is unusable, or a file cannot be read.
    """
    from wgpu_lora.protect.attestation import (
        measurements,  # with wgpu, which a broker that reads evidence does not need
    )

    check_nonce(nonce)
    measurement = measurements.measurements()
    claims: dict[str, Any] = {
        "eat_profile": PROFILE,
        "eat_nonce": nonce,
        "iat": int(time.time()),
        "swname": NAME,
        "swversion": [measurement["package"]["version"]],
        "level": "self-reported",
        "level_note": LEVELS["self-reported"],
        "keys": {"recipient": keys.data.recipient, "signing": keys.signing.public.pem},
        **measurement,
        "device": device and asdict(device),
        "base": base,
        "resume": resume and {"sequence": resume[0], "head": resume[1]},
        "host": host,
    }
    if job is not None:
        claims["job"] = {
            "name": job.name,
            "sha256": job.sha256,
            "recipe_sha256": job.recipe_sha256,
            "options": dict(job.options),
            "recipients": list(job.recipients),
            "data": [{"role": role, **facts} for role, facts in job.digests().items()],
        }
    values = {name: value for name, value in claims.items() if value is not None}
    # As a verifier reads them; file names may be any bytes, which Python has as characters that UTF-8 does not.
    text = json.dumps(values, allow_nan=False, ensure_ascii=False).encode("utf-8", "xmlcharrefreplace")
    plain: dict[str, Any] = json.loads(text)
    return plain


def base_facts(name: str, checkpoint: Any, config: Any) -> dict[str, Any]:
    """What the claims say about a base model; its files' digest leaves out their middle, so that none is read twice."""
    return {"name": name, "sha256": checkpoint.digest(), "hashed": HASHED, "config_sha256": config.digest()}


def check_nonce(nonce: str) -> None:
    """Raises UserError unless a nonce can stand in claims (RFC 9711, 4.1)."""
    if len(nonce) not in NONCE or not nonce.isascii() or not nonce.isprintable():
        raise UserError(
            f"The nonce {nonce!a:.100} is unusable: give the one that the broker printed, of {NONCE.start} to "
            f"{NONCE.stop - 1} ASCII characters."
        )


def digest(claims: Mapping[str, Any]) -> str:
    """SHA-256 of claims as JSON with sorted keys and without spaces, which a TPM's quote and the subject state."""
    return sha256(json.dumps(claims, sort_keys=True, separators=(",", ":")).encode())


def attest(claims: Mapping[str, Any], keys: SessionKeys, quote: bool | None = None) -> bytes:
    """Evidence: the claims in an in-toto statement and a DSSE envelope, signed by the session's key.

    Args:
        quote: whether a TPM signs the claims' digest; by default if there is one that can be used.

    Raises:
        UserError: a quote was asked for and there is no usable TPM, or the claims are too long.
    """
    payload, tpm_quote = dict(claims), None
    if quote is not False:
        quoted_claims = {**payload, "level": "quoted", "level_note": LEVELS["quoted"]}
        try:
            tpm_quote = tpm.quote(bytes.fromhex(digest(quoted_claims)))
            payload = quoted_claims
        except tpm.NoQuoteError as error:
            if quote:
                raise
            payload["no_quote"] = error.problem
    predicate = {"claims": payload} if tpm_quote is None else {"claims": payload, "quote": tpm_quote}
    evidence = dsse.sign(dsse.statement(PROFILE, [("claims", digest(payload))], predicate), keys.signing)
    if len(evidence) > MAX_BYTES:
        raise UserError(f"The evidence is longer than {MAX_BYTES:,} bytes: shorten the job's options.")
    return evidence


def read_evidence(data: bytes) -> Evidence:
    """Read evidence, and verify its signature by the key that it binds, and the quote if there is one.

    Raises:
        UserError: it is no evidence, is damaged, or one of the two does not fit.
    """
    if len(data) > MAX_BYTES:
        raise UserError(f"The evidence is longer than {MAX_BYTES:,} bytes: give the file that protect attest wrote.")
    try:
        signing = PublicKey.parse(_common_claims(dsse.peek(data)).keys.signing)
        statement = dsse.verify(data, signing)
        common, claims = _common_claims(statement), statement["predicate"]["claims"]
        if signing.pem != common.keys.signing:
            raise UserError("its signing key is not in the usual form")
        if str(parse_recipient(common.keys.recipient)) != common.keys.recipient:
            raise UserError("its recipient is not in the usual form")
        check_nonce(common.eat_nonce)
        if (common.level == "quoted") != ("quote" in statement["predicate"]):
            raise UserError("its level does not say whether there is a quote")
        if common.level_note != LEVELS[common.level]:
            raise UserError("its note does not say what its level means")
        quote = None
        if common.level == "quoted":
            quote = tpm.verify(statement["predicate"]["quote"], bytes.fromhex(digest(claims)))
    except (UserError, ValueError, pyrage.RecipientError) as error:
        why = error.problem if isinstance(error, UserError) else str(error)
        if isinstance(error, pyrage.RecipientError):
            why = "its recipient is no age recipient"
        raise UserError(f"This is no valid evidence ({why}): ask for it again.") from None
    return Evidence(claims, quote, signing, common.keys.recipient, sha256(data))


def load_evidence(path: str | Path) -> Evidence:
    """The same from a file."""
    return read_evidence(read_bytes(Path(path), MAX_BYTES))


@dataclass(frozen=True)
class _Keys:
    recipient: str
    signing: str


@dataclass(frozen=True)
class _CommonClaims:
    """The claims that all evidence has."""

    eat_nonce: str
    level: Literal["self-reported", "quoted"]
    level_note: str
    keys: _Keys


def _common_claims(statement: Mapping[str, Any]) -> _CommonClaims:
    """The claims in a statement of this profile, whose subject is their digest. Raises UserError, ValueError."""
    predicate = statement["predicate"]
    claims = predicate.get("claims")
    if statement["predicateType"] != PROFILE or not isinstance(claims, dict) or set(predicate) - {"claims", "quote"}:
        raise UserError("it is another kind of statement")
    if claims.get("eat_profile") != PROFILE:
        raise UserError("its claims have another profile")
    if statement["subject"] != [{"name": "claims", "digest": {"sha256": digest(claims)}}]:
        raise UserError("its subject is not the digest of its claims")
    common: _CommonClaims = typed(_CommonClaims, claims, "its claims")
    return common
