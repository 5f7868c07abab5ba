"""Quotes of a TPM: TPM2_Quote by tpm2-pytss (TPM 2.0 Library, Part 3), and their verification without a TPM (Part 2).

A quote is a signature, by a key that never leaves the TPM, over 32 bytes of ours and the PCRs, which record what the
machine booted. That a key is one of a TPM is known to whoever has enrolled it (`tpm_keys` of a policy), not from the
quote.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa, utils
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

from wgpu_lora.errors import UserError
from wgpu_lora.files.installation import pip_line
from wgpu_lora.files.typed_json import Check, Sha256, typed

DEVICE = Path("/dev/tpmrm0")  # Linux's resource manager
TCTI = "TPM2TOOLS_TCTI"  # the connection to another TPM, as for tpm2-tools
HANDLE = "WGPU_LORA_TPM_KEY"  # a persistent attestation key, such as 0x81010002
BOOT, IMA = tuple(range(8)), 10  # firmware, its settings and the boot loader; Linux's measured files
TRIES = 3  # a PCR may be extended between reading it and quoting it
# 6.2 (TPM_GENERATED), 6.9 (TPM_ST), 6.3 (TPM_ALG_ID).
GENERATED, QUOTE = 0xFF544347, 0x8018
SHA256, RSASSA, RSAPSS, ECDSA = 0x000B, 0x0014, 0x0016, 0x0018
Short = Annotated[str, Check(lambda text: len(text) <= 16 << 10, "a short text")]
Pcr = Annotated[str, Check(re.compile(r"\d|1\d|2[0-3]", re.ASCII).fullmatch, "the number of a PCR, from 0 to 23")]


# -- making quotes -----------------------------------------------------------------------------------------------------


class NoQuoteError(UserError):
    """There is no TPM, or it cannot be used."""


def quote(digest: bytes) -> dict[str, Any]:
    """Quote 32 bytes, and the PCRs of the boot and of IMA, with this machine's TPM.

    The key is the primary one of the owner hierarchy for a fixed template (restricted, signing, P-256), which is the
    same each time, or the persistent key that the environment variable `WGPU_LORA_TPM_KEY` names.

    Returns:
        attest: TPMS_ATTEST, and signature: TPMT_SIGNATURE, in base64; key_pem; pcrs: number -> hexadecimal.

    Raises:
        NoQuoteError: there is no TPM, or it cannot be used.
    """
    with _open_tpm() as tpm:
        handle, pem = _key(tpm)
        try:
            for _ in range(TRIES):
                pcrs = _read_pcrs(tpm, [*BOOT, IMA])
                if not any(pcrs[IMA]):
                    del pcrs[IMA]  # IMA is not in use
                attest, signature = tpm.quote(handle, _selection(pcrs), digest)
                result = {
                    "attest": base64.b64encode(bytes(attest)).decode(),
                    "signature": base64.b64encode(signature.marshal()).decode(),
                    "key_pem": pem,
                    "pcrs": {str(number): value.hex() for number, value in sorted(pcrs.items())},
                }
                try:
                    verify(result, digest)
                except UserError as error:
                    failure = error
                else:
                    return result
        finally:
            if HANDLE not in os.environ:
                tpm.flush_context(handle)
    raise NoQuoteError(f"The TPM made no usable quote ({failure.problem}): attest without one (--no-quote).")


@contextmanager
def _open_tpm() -> Iterator[Any]:
    """A connection to the TPM; its errors become NoQuoteError."""
    connection = os.environ.get(TCTI)
    if connection is None and not DEVICE.exists():
        raise NoQuoteError(f"There is no TPM at {DEVICE}: attest without a quote (--no-quote).")
    if connection is None and not os.access(DEVICE, os.R_OK | os.W_OK):
        raise NoQuoteError(f"{DEVICE} may not be used by this user: add the user to its group (often tss).")
    if find_spec("tpm2_pytss") is None:
        raise NoQuoteError(f"A quote needs tpm2-pytss, which is not installed: run {pip_line('tpm')}.")
    os.environ.setdefault("TSS2_LOG", "all+NONE")  # what fails is said below
    try:
        from tpm2_pytss import ESAPI, TSS2_Exception
    except (ImportError, OSError, RuntimeError) as error:  # the system's libraries are missing
        raise NoQuoteError(f"tpm2-pytss cannot be loaded ({error!s:.100}): install libtss2.") from None
    try:
        with ESAPI(connection or f"device:{DEVICE}") as tpm:
            yield tpm
    except (TSS2_Exception, RuntimeError, ValueError, OSError) as error:
        raise NoQuoteError(f"The TPM cannot be used ({error!s:.100}): attest without a quote (--no-quote).") from None


def _key(tpm: Any) -> tuple[Any, str]:
    """The attestation key: its handle, and its public half as PEM."""
    from tpm2_pytss import TPM2B_PUBLIC, TPMA_OBJECT
    from tpm2_pytss.constants import ESYS_TR

    handle_text = os.environ.get(HANDLE)
    if handle_text is not None:
        handle = tpm.tr_from_tpmpublic(int(handle_text, 16))
        public = tpm.read_public(handle)[0]
    else:
        attributes = (
            TPMA_OBJECT.RESTRICTED | TPMA_OBJECT.SIGN_ENCRYPT | TPMA_OBJECT.FIXEDTPM | TPMA_OBJECT.FIXEDPARENT
            | TPMA_OBJECT.SENSITIVEDATAORIGIN | TPMA_OBJECT.USERWITHAUTH | TPMA_OBJECT.NODA
        )  # fmt: skip
        template = TPM2B_PUBLIC.parse("ecc256:ecdsa-sha256:null", objectAttributes=attributes)
        handle, public, *_ = tpm.create_primary(None, template, ESYS_TR.OWNER)
    return handle, public.to_pem().decode()


def _read_pcrs(tpm: Any, numbers: Iterable[int]) -> dict[int, bytes]:
    """PCRs of SHA-256. A TPM gives at most 8 at a time."""
    pcrs: dict[int, bytes] = {}
    for number in numbers:
        _, _, values = tpm.pcr_read(_selection([number]))
        if not len(values):
            raise ValueError(f"it has no PCR {number} of SHA-256")
        pcrs[number] = bytes(values[0])
    return pcrs


def _selection(numbers: Iterable[int]) -> str:
    return "sha256:" + ",".join(map(str, sorted(numbers)))


# -- verifying them ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Quote:
    """JSON of `tpm.quote`."""

    attest: Short
    signature: Short
    key_pem: Short
    pcrs: Annotated[dict[Pcr, Sha256], Check(bool, "the values of PCRs")]


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
        fields: _Quote = typed(_Quote, quote, "it", unknown="refuse")
        key = load_pem_public_key(fields.key_pem.encode())
        attest, signature = (base64.b64decode(text, validate=True) for text in (fields.attest, fields.signature))
        pcrs = {int(number): bytes.fromhex(value) for number, value in fields.pcrs.items()}
        _check_signature(key, signature, attest)
        contents = _Attest.parse(attest)
        if contents.extra != expected:
            raise ValueError("it quotes other claims")
        if contents.pcrs != tuple(sorted(pcrs)):
            raise ValueError("it quotes other PCRs than those beside it")
        if contents.digest != hashlib.sha256(b"".join(pcrs[number] for number in sorted(pcrs))).digest():
            raise ValueError("the values of its PCRs are others than those quoted")
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(f"The TPM's quote is not valid ({error!s:.100}): ask for evidence again.") from None
    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    values = {number: value.hex() for number, value in pcrs.items()}
    return {"key_pem": pem, "pcrs": values, **contents.facts}


@dataclass(frozen=True)
class _Attest:
    """TPMS_ATTEST of TPM2_Quote (10.12.12)."""

    extra: bytes
    pcrs: tuple[int, ...]
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
        pcrs = tuple(number for number in range(8 * size) if bits >> number & 1)
        digest = reader.sized()
        reader.end()
        facts = {
            "firmware_version": firmware, "clock": clock, "reset_count": resets, "restart_count": restarts,
            "safe": bool(safe),
        }  # fmt: skip
        return cls(extra, pcrs, digest, facts)


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
            signature = reader.sized()
            reader.end()
            pss = padding.PSS(padding.MGF1(algorithm), padding.PSS.AUTO)
            key.verify(signature, signed, padding.PKCS1v15() if scheme == RSASSA else pss, algorithm)
        else:
            raise ValueError("its key and its signature are not of one kind")
    except InvalidSignature:
        raise ValueError("its signature does not fit") from None


class _Reader:
    """Reads structures of the TPM: big-endian numbers, and bytes after their size."""

    def __init__(self, data: bytes):
        self._data, self._at = data, 0

    def exactly(self, size: int) -> bytes:
        chunk = self._data[self._at : self._at + size]
        if len(chunk) != size:
            raise ValueError("it is cut off")
        self._at += size
        return chunk

    def take(self, form: str) -> tuple[int, ...]:
        return struct.unpack(form, self.exactly(struct.calcsize(form)))

    def sized(self) -> bytes:
        (size,) = self.take(">H")
        return self.exactly(size)

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError("something follows it")
