"""OpenSSF model signing of an adapter, in memory: the signature, model.sig, is made before a file touches a disk.

A signature is a Sigstore bundle v0.3 around a DSSE envelope whose in-toto statement lists all files with their SHA-256
(https://github.com/ossf/model-signing-spec). `model_signing verify key` accepts it; `verify_model` uses its library.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from model_signing import hashing, verifying

from wgpu_lora.errors import UserError
from wgpu_lora.names.text import escape_unprintable
from wgpu_lora.protect.evidence import dsse
from wgpu_lora.protect.sealed.keys import PublicKey, SigningKey

NAME = "model.sig"
KIND = "https://model_signing/signature/v1.0"
BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"


def sign_model(files: Mapping[str, bytes | bytearray], key: SigningKey) -> bytes:
    """The content of model.sig for an adapter.

    Args:
        files: contents by their paths in the model's directory, with `/`; without model.sig.
    """
    digests = {path: hashlib.sha256(data).digest() for path, data in sorted(files.items())}
    predicate = {
        "serialization": {
            "method": "files",
            "hash_type": "sha256",
            "allow_symlinks": False,
            "ignore_paths": [NAME],
        },
        "resources": [
            {"name": path, "algorithm": "sha256", "digest": digest.hex()} for path, digest in digests.items()
        ],
    }
    root = hashlib.sha256(b"".join(digests.values())).hexdigest()
    envelope = json.loads(dsse.sign(dsse.statement(KIND, [("adapter", root)], predicate), key))
    hint = hashlib.sha256(key.public.pem.encode()).hexdigest()
    bundle = {
        "mediaType": BUNDLE,
        "verificationMaterial": {"publicKey": {"hint": hint}, "tlogEntries": []},
        "dsseEnvelope": envelope,
    }
    return json.dumps(bundle).encode()


def verify_model(directory: Path, public: PublicKey) -> None:
    """Verify model.sig in a model's directory: signed by this key, and for exactly the files that are there. Raises
    UserError: it is not."""
    # Else the library leaves out the files of git.
    every_file = hashing.Config().use_file_serialization().set_ignored_paths(paths=[NAME], ignore_git_paths=False)
    with tempfile.TemporaryDirectory() as temporary:
        key = Path(temporary, "key.pub")
        key.write_text(public.pem)
        try:
            config = verifying.Config().use_elliptic_key_verifier(public_key=key).set_hashing_config(every_file)
            config.verify(directory, directory / NAME)
        except Exception as error:  # the library raises whatever an invalid bundle causes
            text = str(error).partition(": Expected")[0]  # bytes follow
            cause = escape_unprintable(text)[:200] or type(error).__name__
            raise UserError(
                f"{directory / NAME} does not verify the files of {directory} ({cause}): open the sealed adapter anew."
            ) from None
