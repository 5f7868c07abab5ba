"""Evidence: what it says, and that changed, foreign and hostile evidence is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import pytest
from support import FIXTURES
from support.protect.attesting import MEASURED, NONCE, Job, claimed, quick
from support.protect.tpm import MISSING, software_tpm

from wgpu_lora.errors import UserError
from wgpu_lora.protect.attestation import claims, measurements, tpm
from wgpu_lora.protect.evidence import dsse
from wgpu_lora.protect.sealed.keys import SessionKeys

KEYS, OTHERS = SessionKeys.generate(), SessionKeys.generate()
CLAIMS = claimed(KEYS, Job([KEYS.data.recipient]))
EVIDENCE = claims.attest(CLAIMS, KEYS, quote=False)
RECORDED = json.loads((FIXTURES / "protect" / "quotes.json").read_text())["quotes"]["ecdsa"]


def refused(data: bytes, words: str = ".") -> None:
    with pytest.raises(UserError, match=words) as error:
        claims.read_evidence(data)
    assert str(error.value).count("\n") == 0
    assert len(str(error.value)) < 600


def signed(predicate: Any, keys: SessionKeys = KEYS, kind: str = claims.PROFILE, digest: str = "") -> bytes:
    """Any predicate, signed by these keys, with a subject that fits."""
    stated = predicate.get("claims") if isinstance(predicate, dict) else None
    subject = [("claims", digest or claims.digest(stated if isinstance(stated, dict) else {}))]
    return dsse.sign({**dsse.statement(kind, subject, {}), "predicate": predicate}, keys.signing)


def swapped(old: str, new: str, data: bytes = EVIDENCE) -> bytes:
    """The claims changed, and the subject with them; the signature kept."""
    fields = json.loads(data)
    payload = b64decode(fields["payload"]).decode()
    assert old in payload
    statement = json.loads(payload.replace(old, new))
    statement["subject"][0]["digest"]["sha256"] = claims.digest(statement["predicate"]["claims"])
    fields["payload"] = b64encode(json.dumps(statement).encode()).decode()
    return json.dumps(fields, separators=(",", ":")).encode()


def test_evidence_states_what_was_gathered() -> None:
    evidence = claims.read_evidence(EVIDENCE)
    assert evidence.claims == CLAIMS
    assert evidence.signing == KEYS.signing.public
    assert evidence.recipient == KEYS.data.recipient
    assert evidence.quote is None
    assert evidence.claims["level"] == "self-reported"
    assert "changed program" in evidence.claims["level_note"]
    assert evidence.claims["job"]["data"] == [
        {"role": "data", "name": "rows.jsonl.age", "sha256": "b" * 64, "bytes": 1000, "rows": 100}
    ]
    assert "resume" not in evidence.claims
    assert evidence.claims["eat_nonce"] == NONCE


def test_a_session_that_goes_on_states_the_head_of_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    evidence = claims.gather(None, nonce=NONCE, keys=KEYS, resume=(7, "e" * 64), host={"core_dumps": "off"})
    assert evidence["resume"] == {"sequence": 7, "head": "e" * 64}
    assert evidence["host"] == {"core_dumps": "off"}
    assert "device" not in evidence
    assert "job" not in evidence


def test_changed_evidence_and_evidence_under_another_key_are_refused() -> None:
    """By whoever changes a claim, replaces the signature, the key in the claims, or both in turn."""
    for old, new in (
        ('"self-reported"', '"quoted"'), (NONCE, "nonce-of-a-tesT"), ('"rows":100', '"rows":999'), 
        ("Test GPU", "Best GPU"),
        ('"intact":true', '"intact":null'), (KEYS.data.recipient, OTHERS.data.recipient), ("b" * 64, "a" * 64),
    ):  # fmt: skip
        refused(swapped(old, new), "does not fit")
    foreign = claims.attest(CLAIMS, OTHERS, quote=False)
    refused(foreign, "signed by key")
    fields, mine = json.loads(foreign), json.loads(EVIDENCE)
    mine["signatures"][0]["sig"] = fields["signatures"][0]["sig"]
    refused(json.dumps(mine, separators=(",", ":")).encode(), "does not fit")
    pem = json.dumps(KEYS.signing.public.pem)[1:-1]
    refused(swapped(pem, json.dumps(OTHERS.signing.public.pem)[1:-1]), "signed by key")
    assert claims.digest(json.loads(json.dumps(dict(reversed(CLAIMS.items()))))) == claims.digest(CLAIMS)


def test_what_contradicts_itself_is_refused_though_it_is_signed() -> None:
    refused(signed({"claims": CLAIMS}, kind="https://example.org/other/v1"), "another kind")
    refused(signed({"claims": CLAIMS, "more": 1}), "another kind")
    refused(signed({"claims": CLAIMS}, digest="0" * 64), "subject")
    refused(signed({"claims": {**CLAIMS, "eat_profile": "https://example.org/other"}}), "another profile")
    refused(signed({"claims": {**CLAIMS, "level": "quoted"}}), "level")
    refused(signed({"claims": {**CLAIMS, "level": "certified"}}), "level")
    refused(signed({"claims": CLAIMS, "quote": RECORDED}), "level")
    quoted = {**CLAIMS, "level": "quoted", "level_note": claims.LEVELS["quoted"]}
    refused(signed({"claims": quoted, "quote": RECORDED}), "quotes other claims")
    refused(signed({"claims": quoted, "quote": None}), "quote is not valid")
    for nonce in (None, 7, ["a" * 20], "short"):
        refused(signed({"claims": {**CLAIMS, "eat_nonce": nonce}}), "nonce")
    refused(signed({"claims": {**CLAIMS, "level_note": "All of this is proven."}}), "note")
    folded = KEYS.signing.public.pem.replace("\n", "\r\n")
    refused(signed({"claims": {**CLAIMS, "keys": {**CLAIMS["keys"], "signing": folded}}}), "usual form")
    for recipient in ("age1", KEYS.data.recipient.upper(), "", KEYS.data.text().decode()):
        refused(signed({"claims": {**CLAIMS, "keys": {**CLAIMS["keys"], "recipient": recipient}}}), "recipient|usual")


def test_a_quote_binds_its_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a TPM's part replaced by one that says what it was given."""
    digests: list[bytes] = []
    monkeypatch.setattr(tpm, "quote", lambda digest: digests.append(digest) or {"quoted": digest.hex()})

    def verify(quote: Any, digest: bytes) -> dict[str, Any]:
        if quote != {"quoted": digest.hex()}:
            raise UserError("other claims: ask again.")
        return {"key_pem": "", "pcrs": {}}

    monkeypatch.setattr(tpm, "verify", verify)
    evidence = claims.attest(CLAIMS, KEYS)
    claim_evidence = claims.read_evidence(evidence)
    assert claim_evidence.claims["level"] == "quoted"
    assert claim_evidence.quote is not None
    assert digests == [bytes.fromhex(claims.digest(claim_evidence.claims))]
    refused(
        signed({"claims": {**claim_evidence.claims, "iat": 1}, "quote": dsse.peek(evidence)["predicate"]["quote"]}),
        "other claims",
    )


def test_without_a_tpm_the_evidence_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(tpm.TCTI, raising=False)
    monkeypatch.setattr(tpm, "DEVICE", tmp_path / "tpm")
    evidence = claims.read_evidence(claims.attest(CLAIMS, KEYS))
    assert evidence.claims["level"] == "self-reported"
    assert evidence.claims["no_quote"].startswith("There is no TPM")
    with pytest.raises(UserError, match="There is no TPM"):
        claims.attest(CLAIMS, KEYS, quote=True)


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_a_real_quote_in_evidence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with software_tpm(tmp_path) as connection:
        monkeypatch.setenv(tpm.TCTI, connection)
        evidence = claims.read_evidence(claims.attest(CLAIMS, KEYS, quote=True))
        other = claims.read_evidence(claims.attest({**CLAIMS, "iat": 1}, KEYS, quote=True))
    assert evidence.claims["level"] == "quoted"
    assert evidence.quote is not None
    assert sorted(evidence.quote["pcrs"]) == list(range(8))
    refused(signed({**evidence.statement["predicate"], "quote": other.statement["predicate"]["quote"]}), "other claims")


def test_names_of_files_that_are_no_text_can_be_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {os.fsdecode(b"/lib/\xff.so"): "a", os.fsdecode(b"/lib/\xfe.so"): "b", "/lib/😀.so": "c"}
    monkeypatch.setattr(measurements, "measurements", lambda: {**MEASURED, "process": {"libraries": names}})
    evidence = claims.read_evidence(claims.attest(claims.gather(None, nonce=NONCE, keys=KEYS), KEYS, quote=False))
    stated = evidence.claims["process"]["libraries"]
    assert stated == {"/lib/&#56575;.so": "a", "/lib/&#56574;.so": "b", "/lib/😀.so": "c"}


def test_unusable_nonces_are_refused() -> None:
    for nonce in ("", "short", "n" * 89, "nonce with\nnewline", "nönce-nönce", "nonce\0nonce"):
        with pytest.raises(UserError, match="unusable"):
            claims.gather(None, nonce=nonce, keys=KEYS)


def test_files_of_evidence(tmp_path: Path) -> None:
    (tmp_path / "evidence.json").write_bytes(EVIDENCE)
    assert claims.load_evidence(tmp_path / "evidence.json").claims == CLAIMS
    for wrong in (tmp_path, tmp_path / "missing", "/dev/null", "a\0b"):
        with pytest.raises(UserError, match=r"regular|cannot be read|does not exist"):
            claims.load_evidence(wrong)
    (tmp_path / "long.json").write_bytes(b"x" * (claims.MAX_BYTES + 2))
    with pytest.raises(UserError, match="longer"):
        claims.load_evidence(tmp_path / "long.json")


def test_long_claims_are_refused_before_they_are_sent() -> None:
    with pytest.raises(UserError, match="longer"):
        claims.attest({**CLAIMS, "host": {"a": "b" * claims.MAX_BYTES}}, KEYS, quote=False)


def test_reading_evidence_does_not_load_wgpu() -> None:
    code = "import sys, wgpu_lora.protect.attestation.claims; sys.exit('wgpu' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
