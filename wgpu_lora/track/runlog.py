"""runs.jsonl, the log of all runs of a user: a JSON object per line, appended under a lock and never rewritten.

A line has the id of its run and some fields of `Entry`; later lines of the same id add to them or replace them.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from platformdirs import user_data_dir

from wgpu_lora.bounded import parse_object
from wgpu_lora.errors import UserError
from wgpu_lora.locks import lock_file
from wgpu_lora.strict_json import to_json
from wgpu_lora.track.entry import Entry
from wgpu_lora.track.secrets import masked
from wgpu_lora.typed_json import typed

NAME = "runs.jsonl"
LOCK_SECONDS = 10.0
SCHEMA = 1
FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
DIGESTS = ("git", "process", "id", "date")  # fields that cannot hold a secret, but look like one


def data_directory() -> Path:
    """The user's data directory: WGPU_LORA_DATA_DIR if it is set, else that of the system."""
    named = os.environ.get("WGPU_LORA_DATA_DIR")
    return Path(named) if named else Path(user_data_dir("wgpu-lora"))


def wanted(asked: bool = True) -> bool:
    """Whether runs are logged: the user's choice, unless WGPU_LORA_NO_RUN_LOG turns it off everywhere."""
    return asked and not os.environ.get("WGPU_LORA_NO_RUN_LOG")


@dataclass(frozen=True)
class Runs:
    """The runs of a log, the oldest first, and the number of lines that cannot be read."""

    entries: list[Entry]
    damaged: int


class RunLog:
    """The log at a path, by default runs.jsonl in the user's data directory."""

    def __init__(self, path: Path | None = None):
        self.path = path or data_directory() / NAME

    def append(self, facts: dict[str, Any]) -> None:
        """Append a line, masked, on disk when this returns.

        If a process was killed while it wrote the last line, that line is ended first, so that only it is lost.

        Raises:
            OSError: the file cannot be written, or is locked for LOCK_SECONDS; it is then as before.
        """
        shown = {name: value if name in DIGESTS else masked(value) for name, value in facts.items()}
        line = to_json({"schema": SCHEMA, **shown}, ensure_ascii=True, default=str).encode() + b"\n"
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (
            lock_file(self.path.with_name(f".{NAME}.lock"), LOCK_SECONDS),
            os.fdopen(os.open(self.path, FLAGS, 0o600), "r+b", buffering=0) as file,
        ):
            end = file.seek(0, os.SEEK_END)
            if end:
                file.seek(-1, os.SEEK_END)
                line = (b"" if file.read(1) == b"\n" else b"\n") + line
            try:
                _write(file.fileno(), line)
                os.fsync(file.fileno())
            except BaseException:
                with suppress(OSError):
                    file.truncate(end)  # a full disk leaves no half line
                raise

    def read(self) -> Runs:
        """All runs; a missing file has none.

        Raises:
            UserError: the file cannot be read.
        """
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return Runs([], 0)
        except OSError as error:
            raise UserError(
                f"The run log {self.path} cannot be read ({error.strerror}): fix that, or set WGPU_LORA_DATA_DIR to "
                "another directory."
            ) from None
        folded: dict[str, dict[str, Any]] = {}
        damaged = 0
        for line in content.split(b"\n"):
            if not line.strip():
                continue
            facts = _facts(line)
            if facts is None:
                damaged += 1
                continue
            known = folded.setdefault(facts["id"], facts)
            known.update({name: value for name, value in facts.items() if name != "date"})
        entries = []
        for facts in folded.values():
            try:
                entries.append(typed(Entry, facts))
            except ValueError:  # its first line is lost, or not ours
                damaged += 1
        return Runs(sorted(entries, key=lambda entry: entry.date), damaged)  # of a second: in the order of lines


def _write(descriptor: int, line: bytes) -> None:
    while line:
        line = line[os.write(descriptor, line) :]


def _facts(line: bytes) -> dict[str, Any] | None:
    try:
        facts = parse_object(line, "the line")
    except UserError:
        return None
    return facts if isinstance(facts.get("id"), str) else None


def facts_of(entry: Entry) -> dict[str, Any]:
    """All fields of an entry as JSON values."""
    found: dict[str, Any] = json.loads(
        to_json({item.name: getattr(entry, item.name) for item in fields(entry)}, default=vars)
    )
    return found
