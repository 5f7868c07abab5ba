"""Quotes of this machine's TPM (TPM 2.0 Library, Part 3: TPM2_Quote), made with tpm2-pytss; `quotes` verifies them."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.installation import pip_line
from wgpu_lora.protect.attestation import tpm_quotes

DEVICE = Path("/dev/tpmrm0")  # Linux's resource manager
TCTI = "TPM2TOOLS_TCTI"  # the connection to another TPM, as for tpm2-tools
HANDLE = "WGPU_LORA_TPM_KEY"  # a persistent attestation key, such as 0x81010002
BOOT, IMA = tuple(range(8)), 10  # firmware, its settings and the boot loader; Linux's measured files
TRIES = 3  # a PCR may be extended between reading it and quoting it


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
    with _opened() as tpm:
        handle, pem = _key(tpm)
        try:
            for _ in range(TRIES):
                pcrs = _read_pcrs(tpm, [*BOOT, IMA])
                if not any(pcrs[IMA]):
                    del pcrs[IMA]  # IMA is not in use
                attest, signature = tpm.quote(handle, _selection(pcrs), digest)
                found = {
                    "attest": base64.b64encode(bytes(attest)).decode(),
                    "signature": base64.b64encode(signature.marshal()).decode(),
                    "key_pem": pem,
                    "pcrs": {str(number): value.hex() for number, value in sorted(pcrs.items())},
                }
                try:
                    tpm_quotes.verify(found, digest)
                except UserError as error:
                    wrong = error
                else:
                    return found
        finally:
            if HANDLE not in os.environ:
                tpm.flush_context(handle)
    raise NoQuoteError(f"The TPM made no usable quote ({wrong.problem}): attest without one (--no-quote).")


@contextmanager
def _opened() -> Iterator[Any]:
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

    given = os.environ.get(HANDLE)
    if given is not None:
        handle = tpm.tr_from_tpmpublic(int(given, 16))
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
    found: dict[int, bytes] = {}
    for number in numbers:
        _, _, values = tpm.pcr_read(_selection([number]))
        if not len(values):
            raise ValueError(f"it has no PCR {number} of SHA-256")
        found[number] = bytes(values[0])
    return found


def _selection(numbers: Iterable[int]) -> str:
    return "sha256:" + ",".join(map(str, sorted(numbers)))
