"""Verification of a TPM's quotes, without a TPM (TPM 2.0 Library, Part 2: Structures).

A quote is a signature, by a key that never leaves the TPM, over 32 bytes of ours and the PCRs, which record what the
machine booted. That a key is one of a TPM is known to whoever has enrolled it (`tpm_keys` of a policy), not from the
quote.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa, utils
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

from wgpu_lora.errors import UserError

# 6.2 (TPM_GENERATED), 6.9 (TPM_ST), 6.3 (TPM_ALG_ID).
GENERATED, QUOTE = 0xFF544347, 0x8018
SHA256, RSASSA, RSAPSS, ECDSA = 0x000B, 0x0014, 0x0016, 0x0018
MAX_PCR, MAX_PART = 24, 16 << 10


def verify(quote: object, expected: bytes) -> dict[str, Any]:
    """Check a quote, as JSON of `tpm.quote`: its signature, what it quotes, and the values of the PCRs beside it.

    Args:
        expected: the qualifying data, a digest of what is attested.

    Returns:
        key_pem: the attestation key, in one form. pcrs: number -> value in hexadecimal, of SHA-256.
        firmware_version, clock (ms), reset_count, restart_count, safe: as the TPM states them.

    Raises:
        UserError: anything does not fit.
    """
    try:
        if not isinstance(quote, dict) or set(quote) != {"attest", "signature", "key_pem", "pcrs"}:
            raise ValueError("it does not have the fields attest, signature, key_pem and pcrs")
        key = load_pem_public_key(_str(quote["key_pem"]).encode())
        attest, pcrs = _bytes(quote["attest"]), _pcrs(quote["pcrs"])
        _check_signature(key, _bytes(quote["signature"]), attest)
        found = _Attest.parse(attest)
        if found.extra != expected:
            raise ValueError("it quotes other claims")
        if found.selected != tuple(sorted(pcrs)):
            raise ValueError("it quotes other PCRs than those beside it")
        if found.digest != hashlib.sha256(b"".join(pcrs[number] for number in sorted(pcrs))).digest():
            raise ValueError("the values of its PCRs are others than those quoted")
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(f"The TPM's quote is not valid ({error!s:.100}): ask for evidence again.") from None
    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    values = {number: value.hex() for number, value in pcrs.items()}
    return {"key_pem": pem, "pcrs": values, **found.facts}


@dataclass(frozen=True)
class _Attest:
    """TPMS_ATTEST of TPM2_Quote (10.12.12)."""

    extra: bytes
    selected: tuple[int, ...]
    digest: bytes
    facts: dict[str, Any]

    @classmethod
    def parse(cls, data: bytes) -> _Attest:
        """Raises ValueError unless it is one, of PCRs of SHA-256, and nothing follows."""
        reader = _Reader(data)
        magic, kind = reader.take(">IH")
        if (magic, kind) != (GENERATED, QUOTE):
            raise ValueError("it is not a structure that a TPM made for a quote")
        reader.sized()  # the key's qualified name
        extra = reader.sized()
        clock, resets, restarts, safe, firmware = reader.take(">QIIBQ")
        (count,) = reader.take(">I")
        if count != 1:
            raise ValueError("it does not quote exactly one bank of PCRs")
        bank, size = reader.take(">HB")
        if bank != SHA256:
            raise ValueError("its PCRs are not of SHA-256")
        bits = int.from_bytes(reader.exactly(size), "little")
        selected = tuple(number for number in range(8 * size) if bits >> number & 1)
        digest = reader.sized()
        reader.end()
        facts = {
            "firmware_version": firmware, "clock": clock, "reset_count": resets, "restart_count": restarts,
            "safe": bool(safe),
        }  # fmt: skip
        return cls(extra, selected, digest, facts)


def _check_signature(key: Any, data: bytes, signed: bytes) -> None:
    """Check a TPMT_SIGNATURE (11.3.4) with SHA-256. Raises ValueError unless the key made it."""
    reader = _Reader(data)
    scheme, kind = reader.take(">HH")
    if kind != SHA256:
        raise ValueError("its signature is not over SHA-256")
    algorithm = hashes.SHA256()
    try:
        if scheme == ECDSA and isinstance(key, ec.EllipticCurvePublicKey):
            r, s = (int.from_bytes(reader.sized(), "big") for _ in range(2))
            reader.end()
            key.verify(utils.encode_dss_signature(r, s), signed, ec.ECDSA(algorithm))
        elif scheme in (RSASSA, RSAPSS) and isinstance(key, rsa.RSAPublicKey) and key.key_size >= 2048:
            found = reader.sized()
            reader.end()
            pss = padding.PSS(padding.MGF1(algorithm), padding.PSS.AUTO)
            key.verify(found, signed, padding.PKCS1v15() if scheme == RSASSA else pss, algorithm)
        else:
            raise ValueError("its key and its signature are not of one kind")
    except InvalidSignature:
        raise ValueError("its signature does not fit") from None


class _Reader:
    """Reads structures of the TPM: big-endian numbers, and bytes after their size."""

    def __init__(self, data: bytes):
        self._data, self._at = data, 0

    def exactly(self, size: int) -> bytes:
        found = self._data[self._at : self._at + size]
        if len(found) != size:
            raise ValueError("it is cut off")
        self._at += size
        return found

    def take(self, form: str) -> tuple[int, ...]:
        return struct.unpack(form, self.exactly(struct.calcsize(form)))

    def sized(self) -> bytes:
        (size,) = self.take(">H")
        return self.exactly(size)

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError("something follows it")


def _str(value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_PART:
        raise ValueError("a field is not text")
    return value


def _bytes(value: object) -> bytes:
    try:
        found = base64.b64decode(_str(value), validate=True)
    except binascii.Error:
        raise ValueError("a field is not base64") from None
    if base64.b64encode(found).decode() != value:
        raise ValueError("a field is not base64")
    return found


def _pcrs(value: object) -> dict[int, bytes]:
    """{"0": hexadecimal, ...} -> by number."""
    if not isinstance(value, dict) or not value:
        raise ValueError("it has no PCRs")
    found: dict[int, bytes] = {}
    for name, text in value.items():
        if name not in map(str, range(MAX_PCR)):
            raise ValueError("there is no such PCR")
        found[int(name)] = bytes.fromhex(_str(text))
        if found[int(name)].hex() != text or len(found[int(name)]) != 32:
            raise ValueError("a PCR is not a SHA-256")
    return found
