"""The files of the output directory, and which directories may be replaced by it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import IO, Any

from wgpu_lora.atomic import check_new, check_not_around
from wgpu_lora.data.preparing.inputs import REJECTED, REPORT, is_result
from wgpu_lora.data.preparing.kinds import FILES, VALID
from wgpu_lora.errors import UserError
from wgpu_lora.names.spelling import flag
from wgpu_lora.strict_json import to_json

WRITTEN = {*FILES.values(), VALID, REPORT, REJECTED}


class Lines:
    """A JSONL file that is being written: its rows, bytes and SHA-256."""

    def __init__(self, path: Path) -> None:
        self._path, self._hash = path, hashlib.sha256()
        self._file: IO[bytes] | None = None
        self.rows = self.bytes = 0

    def add(self, line: bytes) -> None:
        """Add a line that ends with a line break."""
        if self._file is None:
            self._file = self._path.open("wb", buffering=1 << 20)
        self._file.write(line)
        self._hash.update(line)
        self.rows, self.bytes = self.rows + 1, self.bytes + len(line)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def facts(self) -> dict[str, Any]:
        return {"rows": self.rows, "bytes": self.bytes, "sha256": self._hash.hexdigest()}


def encoded(row: Any) -> bytes:
    """A row as a line of JSONL; numbers that JSON lacks become null.

    Raises:
        UnicodeEncodeError: a text has a lone surrogate. TypeError: a value is not of JSON. RecursionError.
    """
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = to_json(row, ensure_ascii=False)
    return text.encode() + b"\n"


def refuse_output(output: Path, overwrite: bool) -> None:
    """Raise UserError if a directory exists that may not be replaced."""
    there = {path.name for path in output.iterdir()} if output.is_dir() and not output.is_symlink() else set()
    if there:
        check_not_around(output, flag("output"))
    else:
        check_new(output, flag("output"), directory=True)
        return
    if not is_result(output) or there - WRITTEN:
        others = sorted(there - WRITTEN or there)
        raise UserError(
            f"{output} holds other files ({others[0]!a:.80}): give {flag('output')} a directory that does not exist."
        )
    if not overwrite:
        raise UserError(f"{output} has been prepared already: give {flag('overwrite')} to replace it.")
