"""Signed statements: in-toto Statement v1 in DSSE envelopes, signed with ECDSA P-256.

in-toto: https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md,
DSSE: https://github.com/secure-systems-lab/dsse/blob/master/envelope.md.
Envelopes are read in the one form that `sign` writes, so that no byte of one can be changed unnoticed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import STATEMENT_TYPE_URI, Statement
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import UnverifiedSignatureError, VerificationError

from wgpu_lora.errors import UserError
from wgpu_lora.files.json_files import MAX_JSON_BYTES, parse_object
from wgpu_lora.files.typed_json import Sha256, typed
from wgpu_lora.names.text import escape_unprintable
from wgpu_lora.protect.sealed.keys import PublicKey, SigningKey

STATEMENT = "application/vnd.in-toto+json"
MAX_BYTES = MAX_JSON_BYTES  # of an envelope; evidence takes 0.2 MB
GET = "get the original file"


@dataclass(frozen=True)
class _Digests:
    sha256: Sha256


@dataclass(frozen=True)
class _Subject:
    name: str
    digest: _Digests


def statement(predicate_type: str, subjects: Sequence[tuple[str, str]], predicate: Mapping[str, Any]) -> dict[str, Any]:
    """An in-toto Statement v1.

    Args:
        predicate_type: a URI that names the schema of `predicate`.
        subjects: (name, SHA-256 in hex) of what the statement is about.
    """
    return {
        "_type": STATEMENT_TYPE_URI,
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in subjects],
        "predicateType": predicate_type,
        "predicate": dict(predicate),
    }


def sign(statement: Mapping[str, Any], key: SigningKey) -> bytes:
    """A DSSE envelope of a statement: JSON on one line, without a newline. Raises UserError: it is not an in-toto
    statement in standard JSON, or too long."""
    try:
        payload = json.dumps(statement, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"The statement cannot be written as JSON ({error}): use plain values.") from None
    _parse_statement(payload)
    envelope = Envelope(payload, STATEMENT, {})
    envelope.sign(key.signer)
    if len(signed := _write(envelope)) > MAX_BYTES:
        raise UserError(f"The signed statement is longer than {MAX_BYTES:,} bytes: shorten it.")
    return signed


def verify(envelope: bytes, key: PublicKey) -> dict[str, Any]:
    """The statement in an envelope, if `key` signed it.

    Raises:
        UserError: it did not, or the bytes are not as `sign` writes them.
    """
    opened = _read(envelope)
    if list(opened.signatures) != [key.keyid]:
        keyids = ", ".join(opened.signatures)
        raise UserError(f"The statement is signed by key {keyids!a:.80}, not by {key.keyid}: get the original.")
    try:
        opened.verify([key.ssl_key()], 1)
    except (VerificationError, UnverifiedSignatureError):
        raise UserError("The statement's signature does not fit it: get the original file.") from None
    return _parse_statement(opened.payload)


def peek(envelope: bytes) -> dict[str, Any]:
    """The statement in an envelope whose signature is not checked: only to find the key in it.

    Raises:
        UserError: the bytes are not as `sign` writes them.
    """
    return _parse_statement(_read(envelope).payload)


def _write(envelope: Envelope) -> bytes:
    return json.dumps(envelope.to_dict(), separators=(",", ":")).encode()


def _read(data: bytes) -> Envelope:
    """Parse an envelope with one signature."""
    fields = parse_object(data, "The signed statement", MAX_BYTES, cure=GET)
    try:
        if fields["payloadType"] != STATEMENT:
            raise ValueError(f"its type is {fields['payloadType']!a:.80}, not {STATEMENT}")
        if not isinstance(fields["signatures"], list) or len(fields["signatures"]) != 1:
            raise ValueError("it does not have exactly one signature")
        (signature,) = fields["signatures"]
        if set(signature) != {"keyid", "sig"} or not isinstance(signature["keyid"], str):
            raise ValueError("its signature has other fields than keyid and sig")
        envelope = Envelope.from_dict(fields)
        if _write(envelope) != data:
            raise ValueError("it is not written as this package does")
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        why = escape_unprintable(str(error))[:200]
        raise UserError(f"A signed statement cannot be read ({why}): get the original file.") from None
    return envelope


def _parse_statement(payload: bytes) -> dict[str, Any]:
    """Parse a payload as in-toto Statement v1."""
    fields = parse_object(payload, "The statement", MAX_BYTES, cure=GET)
    try:
        if set(fields) != {"_type", "subject", "predicateType", "predicate"}:
            raise ValueError("it has other fields than in-toto Statement v1")
        json.dumps(fields, allow_nan=False)  # Python reads NaN, and 1e999 as infinity
        if not isinstance(fields["predicate"], dict) or not fields["predicate"]:
            raise ValueError("it has no predicate")
        # The predicate is JSON already. As a protobuf Struct its whole numbers would become floats.
        head = json_format.ParseDict({**fields, "predicate": {"is": True}}, statement_pb2.Statement())
        Statement.copy_from_pb(head).validate()
        typed(list[_Subject], fields["subject"], "its subject")
    except (ValueError, TypeError, LookupError, RecursionError, json_format.Error) as error:
        why = escape_unprintable(str(error))[:200]
        raise UserError(f"The signed content is no in-toto statement ({why}): get the original file.") from None
    return fields
