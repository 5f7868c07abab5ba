"""Quotes of TPMs: recorded ones are verified, changed ones are refused, and a TPM in software makes new ones."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st
from support import FIXTURES
from support.protect.tpm import MISSING, extend, rsa_key, software_tpm

from wgpu_lora.errors import UserError
from wgpu_lora.protect.attestation import tpm

RECORDED = json.loads((FIXTURES / "protect" / "quotes.json").read_text())
DIGEST, KINDS = bytes.fromhex(RECORDED["digest"]), sorted(RECORDED["quotes"])
QUOTE: dict[str, Any] = RECORDED["quotes"]["ecdsa"]
needs_tpm = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


def refused(quote: object, words: str, digest: bytes = DIGEST) -> None:
    with pytest.raises(UserError, match=f"not valid.*{words}"):
        tpm.verify(quote, digest)


def pem(key: Any) -> str:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_quotes_are_valid(kind: str) -> None:
    quote = tpm.verify(RECORDED["quotes"][kind], DIGEST)
    assert quote["key_pem"] == RECORDED["quotes"][kind]["key_pem"]
    assert sorted(quote["pcrs"]) == [*range(8), 10]
    assert quote["pcrs"][1] == "00" * 32 != quote["pcrs"][10]
    assert quote["clock"] > 0


def test_a_quote_of_something_else_is_refused() -> None:
    refused(QUOTE, "other claims", bytes(32))
    refused(QUOTE, "other claims", DIGEST[:-1])
    refused({**QUOTE, "attest": RECORDED["quotes"]["rsassa"]["attest"]}, "signature does not fit")


def test_other_pcrs_than_those_quoted_are_refused() -> None:
    pcrs = QUOTE["pcrs"]
    for number in pcrs:
        refused({**QUOTE, "pcrs": {**pcrs, number: "01" * 32}}, "values of its PCRs")
        refused({**QUOTE, "pcrs": {name: value for name, value in pcrs.items() if name != number}}, "other PCRs")
    refused({**QUOTE, "pcrs": {**pcrs, "8": "00" * 32}}, "other PCRs")
    refused({**QUOTE, "pcrs": {**pcrs, "0": pcrs["1"], "1": pcrs["0"]}}, "values of its PCRs")
    for wrong in ({}, [], None, {"24": "00" * 32}, {"00": "00" * 32}, {"0": "00"}, {"0": "AB" * 32}, {"0": 0}):
        refused({**QUOTE, "pcrs": wrong}, "pcrs|PCR")


def test_another_key_is_refused() -> None:
    for key in (ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP384R1())):
        refused({**QUOTE, "key_pem": pem(key)}, "does not fit")
    refused({**QUOTE, "key_pem": pem(rsa.generate_private_key(65537, 2048))}, "one kind")
    for kind in ("rsassa", "rsapss"):
        refused({**QUOTE, "key_pem": RECORDED["quotes"][kind]["key_pem"]}, "one kind")
        refused({**RECORDED["quotes"][kind], "key_pem": QUOTE["key_pem"]}, "one kind")
        refused({**RECORDED["quotes"][kind], "key_pem": pem(rsa.generate_private_key(65537, 2048))}, "does not fit")
    refused({**QUOTE, "key_pem": "-----BEGIN"}, "")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", ["attest", "signature"])
def test_every_changed_byte_and_length_is_refused(kind: str, part: str) -> None:
    quote = RECORDED["quotes"][kind]
    data = base64.b64decode(quote[part])

    def refuse_change(changed: bytes) -> None:
        refused({**quote, part: base64.b64encode(changed).decode()}, "")

    for place in range(len(data)):
        refuse_change(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    for end in range(0, len(data), 5):
        refuse_change(data[:end])
    refuse_change(data + b"\0")
    refused({**quote, part: quote[part][:4] + "\n" + quote[part][4:]}, "")


ANY = st.none() | st.integers() | st.text(max_size=20) | st.lists(st.none(), max_size=2) | st.just({})


@settings(deadline=None, max_examples=60)
@given(ANY, st.sampled_from([*QUOTE, "more"]))
def test_fields_of_any_type_are_refused(value: Any, name: str) -> None:
    refused({**QUOTE, name: value}, "")


def test_without_a_tpm_it_is_said_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(tpm.TCTI, raising=False)
    monkeypatch.setattr(tpm, "DEVICE", tmp_path / "tpmrm0")
    with pytest.raises(tpm.NoQuoteError, match="no TPM at"):
        tpm.quote(DIGEST)


def test_without_the_library_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tpm.TCTI, "device:/dev/null")
    monkeypatch.setattr(tpm, "find_spec", lambda name: None)
    with pytest.raises(tpm.NoQuoteError, match=r"tpm2-pytss, which is not installed: run .*tpm"):
        tpm.quote(DIGEST)


@needs_tpm
def test_a_tpm_with_a_lasting_key_and_its_pcrs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with software_tpm(tmp_path) as connection:
        monkeypatch.setenv(tpm.TCTI, connection)
        first = tpm.verify(tpm.quote(DIGEST), DIGEST)
        extend(connection, 4, DIGEST)
        extend(connection, tpm.IMA, DIGEST)
        second = tpm.verify(tpm.quote(DIGEST), DIGEST)
        assert first["key_pem"] == second["key_pem"]
        assert tpm.IMA not in first["pcrs"]  # not in use until it is extended
        assert {number for number in second["pcrs"] if second["pcrs"][number] != first["pcrs"].get(number)} == {4, 10}
        for scheme in ("rsassa", "rsapss"):
            monkeypatch.setenv(tpm.HANDLE, rsa_key(connection, scheme))
            assert tpm.verify(tpm.quote(DIGEST), DIGEST)["pcrs"] == second["pcrs"]
        for handle in ("0x81019999", "none"):
            monkeypatch.setenv(tpm.HANDLE, handle)
            with pytest.raises(tpm.NoQuoteError, match="cannot be used"):
                tpm.quote(DIGEST)
        monkeypatch.delenv(tpm.HANDLE)
    with pytest.raises(tpm.NoQuoteError, match="cannot be used"):
        tpm.quote(DIGEST)
