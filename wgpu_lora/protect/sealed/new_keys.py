"""New keys in files, for data owners."""

from __future__ import annotations

from pathlib import Path

from wgpu_lora.atomic import write_new_bytes
from wgpu_lora.errors import UserError
from wgpu_lora.protect.sealed.keys import DataKey, PublicKey, SigningKey, write_private


def new_data_key(path: Path) -> str:
    """Writes a new age identity and returns its recipient. Raises UserError if the path exists or cannot be written."""
    _check_file(path)
    key = DataKey.generate()
    try:
        write_private(path, key.file_text())
        return key.recipient
    finally:
        key.wipe()


def new_signing_key(path: Path) -> PublicKey:
    """Writes a new P-256 key to `path` (PKCS #8 in PEM), and its public half to PATH.pub.

    Raises:
        UserError: one of the two exists or cannot be written; then neither is left.
    """
    _check_file(path)
    public_path = path.with_name(f"{path.name}.pub")
    key = SigningKey.generate()
    try:
        write_private(path, key.private_pem())
        try:
            write_new_bytes(public_path, key.public.pem.encode(), "PATH")
        except BaseException:
            path.unlink()
            raise
        return key.public
    finally:
        key.wipe()


def _check_file(path: Path) -> None:
    if path.name in ("", "-", ".."):
        raise UserError(f"A key is written to a file of its own, not to '{path}': give a path, such as data.key.")
