"""What a job is made of besides its recipe: digests of sealed files, and of models and adapters beside the base."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from wgpu_lora.atomic import file_digest
from wgpu_lora.errors import UserError
from wgpu_lora.names.spelling import flag
from wgpu_lora.protect.sealed.files import SealRecord, record_path

# Options that name models and adapters in the clear, which decide about what is learnt as the data do.
BESIDE = ("reference_adapter", "teacher", "teacher_adapter")


def sealed_facts(path: Path) -> dict[str, Any]:
    """Of a sealed file: name, sha256, bytes and, if its record states them, rows.

    Raises:
        UserError: it cannot be read, or is not the one that its record is about.
    """
    found = _facts(path)
    beside = record_path(path)
    if beside.exists():
        record = SealRecord.read(beside)
        if record.sha256 != found["sha256"]:
            raise UserError(f"{path} is not the file that {beside.name} is about: restore the file that was sealed.")
        if record.rows is not None:
            found["rows"] = record.rows
    return found


def model_facts(option: str, path: Path) -> dict[str, Any]:
    """Of a model or an adapter: name, bytes and sha256; of a directory, of the lines which sha256sum prints for it.

    Raises:
        UserError: it is not on this machine, or a file cannot be read.
    """
    if path.is_file():
        return _facts(path)
    if not path.is_dir():
        raise UserError(f"{flag(option)} {path} is not a directory here, so it cannot be attested: download it first.")
    files = {one.relative_to(path).as_posix(): _facts(one) for one in sorted(path.rglob("*")) if one.is_file()}
    listing = "".join(f"{facts['sha256']}  {name}\n" for name, facts in sorted(files.items()))
    size = sum(facts["bytes"] for facts in files.values())
    return {"name": path.name, "sha256": hashlib.sha256(listing.encode()).hexdigest(), "bytes": size}


def _facts(path: Path) -> dict[str, Any]:
    try:
        return {"name": path.name, "sha256": file_digest(path), "bytes": path.stat().st_size}
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check its permissions.") from None
