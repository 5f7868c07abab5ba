"""A TPM in software (swtpm) for tests of quotes."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

MISSING = [name for name in ("swtpm",) if shutil.which(name) is None] + [
    name for name in ("tpm2_pytss",) if find_spec(name) is None
]


@contextmanager
def software_tpm(state: Path) -> Iterator[str]:
    """Starts swtpm with its state in this directory; gives the value of TPM2TOOLS_TCTI."""
    state.mkdir(exist_ok=True)
    server, control = (str(state / name) for name in ("server", "server.ctrl"))
    command = [
        "swtpm", "socket", "--tpm2", "--tpmstate", f"dir={state}", "--flags", "not-need-init,startup-clear",
        "--server", f"type=unixio,path={server}", "--ctrl", f"type=unixio,path={control}",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _wait_for(control)
            yield f"swtpm:path={server}"
        finally:
            process.terminate()


def _wait_for(path: str) -> None:
    end = time.monotonic() + 20
    while True:
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(path)
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def extend(connection: str, number: int, digest: bytes) -> None:
    """Extends a PCR of SHA-256."""
    from tpm2_pytss import ESAPI, TPML_DIGEST_VALUES, TPMT_HA, TPMU_HA
    from tpm2_pytss.constants import ESYS_TR, TPM2_ALG

    with ESAPI(connection) as tpm:
        value = TPMT_HA(hashAlg=TPM2_ALG.SHA256, digest=TPMU_HA(sha256=digest))
        tpm.pcr_extend(ESYS_TR(number), TPML_DIGEST_VALUES([value]))


def rsa_key(connection: str, scheme: str) -> str:
    """Makes a persistent attestation key (RSA 2048, "rsassa" or "rsapss"); its handle, in hexadecimal."""
    from tpm2_pytss import ESAPI, TPM2B_PUBLIC, TPMA_OBJECT
    from tpm2_pytss.constants import ESYS_TR

    handle = {"rsassa": "0x81010002", "rsapss": "0x81010003"}[scheme]
    attributes = (
        TPMA_OBJECT.RESTRICTED | TPMA_OBJECT.SIGN_ENCRYPT | TPMA_OBJECT.FIXEDTPM | TPMA_OBJECT.FIXEDPARENT
        | TPMA_OBJECT.SENSITIVEDATAORIGIN | TPMA_OBJECT.USERWITHAUTH
    )  # fmt: skip
    with ESAPI(connection) as tpm:
        template = TPM2B_PUBLIC.parse(f"rsa2048:{scheme}-sha256:null", objectAttributes=attributes)
        key_handle = tpm.create_primary(None, template, ESYS_TR.OWNER)[0]
        tpm.evict_control(ESYS_TR.OWNER, key_handle, int(handle, 16))
        tpm.flush_context(key_handle)
    return handle
