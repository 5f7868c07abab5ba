"""Make tests/fixtures/protect/quotes.json: quotes of a TPM in software (swtpm), with keys of P-256 and RSA.

Needs swtpm and tpm2-pytss: `apt install swtpm libtss2-dev` and `pip install -e '.[tpm]'`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.protect.tpm import extend, rsa_key, software_tpm  # noqa: E402

from wgpu_lora.protect.attestation import tpm  # noqa: E402


def main() -> None:
    digest = hashlib.sha256(b"claims").digest()
    with tempfile.TemporaryDirectory() as state, software_tpm(Path(state)) as connection:
        os.environ[tpm.TCTI] = connection
        for number in (0, 4, 7, tpm.IMA):
            extend(connection, number, hashlib.sha256(b"%d" % number).digest())
        quotes = {"ecdsa": tpm.quote(digest)}
        for scheme in ("rsassa", "rsapss"):
            os.environ[tpm.HANDLE] = rsa_key(connection, scheme)
            quotes[scheme] = tpm.quote(digest)
    content = {"digest": digest.hex(), "quotes": quotes}
    path = ROOT / "tests" / "fixtures" / "protect" / "quotes.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
