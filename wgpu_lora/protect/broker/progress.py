"""Reports of a session to the broker: how far its evidence log has come, so that it cannot be put back unnoticed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from wgpu_lora.protect.evidence import envelope
from wgpu_lora.protect.sealed.keys import PublicKey, SigningKey

PROGRESS = "https://example.org/wgpu-lora/progress/v1"
_DIGEST = re.compile("[0-9a-f]{64}")


def sign_progress(job: str, sequence: int, head: str, key: SigningKey) -> bytes:
    """A DSSE envelope that says that the evidence log of a job has come to a line.

    Args:
        job: the job's name. sequence, head: number and SHA-256 of the line. key: of the session.
    """
    facts = {"job": job, "session": key.public.keyid, "sequence": sequence, "head": head}
    return envelope.sign(envelope.statement(PROGRESS, [("evidence.jsonl", head)], facts), key)


def session_of(signed: bytes) -> str:
    """The keyid that a report claims to be signed by. Raises EnvelopeError."""
    return str(_facts(envelope.peek(signed))["session"])


def read_progress(signed: bytes, key: PublicKey) -> dict[str, Any]:
    """`job`, `session`, `sequence` and `head` of a report that `key` signed. Raises EnvelopeError."""
    return _facts(envelope.verify(signed, key))


def _facts(statement: Mapping[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = statement["predicate"]
    kinds = {"job": str, "session": str, "sequence": int, "head": str}
    wrong = statement["predicateType"] != PROGRESS or set(facts) != set(kinds)
    if wrong or any(type(facts[name]) is not kind for name, kind in kinds.items()):
        raise envelope.EnvelopeError("The report of progress has other fields than it should: update the trainer.")
    if not 0 <= facts["sequence"] < 1 << 53 or not _DIGEST.fullmatch(facts["head"]):
        raise envelope.EnvelopeError("The report of progress names no line of a log: update the trainer.")
    return facts
