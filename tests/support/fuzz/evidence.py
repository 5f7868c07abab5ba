"""Evidence of protected training, signed whatever it says, so that mutated claims are read."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from securesystemslib.dsse import Envelope

from support.protect.attesting import Job, claimed
from wgpu_lora.protect.attestation import claims
from wgpu_lora.protect.evidence import dsse
from wgpu_lora.protect.sealed.keys import SessionKeys


@cache
def session() -> SessionKeys:
    return SessionKeys.generate()


def statements(place: Path) -> list[bytes]:
    """Two statements: self-reported, and with a quote."""
    stated = claimed(session(), Job([session().data.recipient]))
    quoted = {**stated, "level": "quoted", "level_note": claims.LEVELS["quoted"]}
    parts = {"attest": "/1RDRw==", "signature": "ABg=", "key_pem": session().signing.public.pem}
    quote = {**parts, "pcrs": {"0": "00" * 32}}
    predicates = [{"claims": stated}, {"claims": quoted, "quote": quote}]
    return [
        json.dumps(dsse.statement(claims.PROFILE, [("claims", claims.digest(predicate["claims"]))], predicate)).encode()
        for predicate in predicates
    ]


def read(data: bytes) -> None:
    """With a subject that fits the claims, if there are any."""
    try:
        statement = json.loads(data)
        statement["subject"][0]["digest"]["sha256"] = claims.digest(statement["predicate"]["claims"])
        data = json.dumps(statement).encode()
    except (ValueError, TypeError, LookupError, RecursionError):
        pass
    signed = Envelope(data, dsse.STATEMENT, {})
    signed.sign(session().signing.signer)
    claims.read_evidence(json.dumps(signed.to_dict(), separators=(",", ":")).encode())
