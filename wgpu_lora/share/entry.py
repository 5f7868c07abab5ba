"""Entries of a ledger, which hold or wait for memory, and their JSON format."""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

from wgpu_lora.share.owner import boot_id, host_id, start_of

SCHEMA = 1
TYPES: dict[str, Any] = {"str": str, "int": int, "float": (int, float), "bool": bool}
# Owners renew at least this often: holders on a timer, waiters each time they look.
RENEW_SECONDS = 30.0
FORGET_SECONDS = 4 * RENEW_SECONDS


@dataclass(frozen=True)
class Entry:
    """Device memory that one run holds or waits for.

    Attributes:
        bytes: device memory; 0 for a lease that was released by hand while its owner lives.
        what: purpose, in a few words.
        holds: True for a lease, False for a place in the queue.
        since: when it began to hold or to wait; renewed: when its owner last renewed it. Seconds since 1970.
        host, pid, started, boot_id: the owner, as identified by share.owner.
    """

    id: str
    bytes: int
    what: str
    holds: bool
    since: float
    renewed: float
    host: str
    pid: int
    started: int
    boot_id: str

    @classmethod
    def of_this_process(cls, nbytes: int, what: str, *, holds: bool = False) -> Entry:
        now, pid = time.time(), os.getpid()
        started = start_of(pid)
        assert started is not None
        return cls(uuid.uuid4().hex[:8], nbytes, what, holds, now, now, host_id(), pid, started, boot_id())

    @property
    def dead(self) -> bool:
        """Whether the owner has ended.

        On this host this is exact: a suspended process keeps its memory even though it does not renew. Processes of
        other hosts and containers are not visible, and count as dead after FORGET_SECONDS without renewal.
        """
        if self.host != host_id():
            return time.time() - self.renewed > FORGET_SECONDS
        return self.boot_id != boot_id() or start_of(self.pid) != self.started

    @property
    def here(self) -> bool:
        """Whether the entry is of this machine: machines that share a home directory share the ledger file."""
        return self.boot_id == boot_id()

    @property
    def who(self) -> str:
        """The owner, for messages."""
        return f"pid {self.pid}{'' if self.host == host_id() else f' on {self.host}'} ({self.what})"


def dump(entries: list[Entry]) -> bytes:
    return (json.dumps({"schema": SCHEMA, "entries": [asdict(e) for e in entries]}, indent=1) + "\n").encode()


def parse(data: bytes) -> list[Entry]:
    """Parse the entries of a ledger. Raises ValueError, with the reason, for anything that `dump` does not write."""
    try:
        content = json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"it is not of schema {SCHEMA}")
    values = content.get("entries")
    if not isinstance(values, list):
        raise ValueError("it has no list of entries")
    entries = [_entry(value) for value in values]
    if len({e.id for e in entries}) < len(entries):
        raise ValueError("two entries have the same id")
    return entries


def salvage(data: bytes) -> list[Entry]:
    """Find all intact entries in a damaged ledger."""
    return list({entry.id: entry for entry in _salvaged(data.decode(errors="replace"))}.values())


def _salvaged(text: str) -> Iterator[Entry]:
    position = text.find("{")
    while position >= 0:
        with suppress(ValueError, RecursionError):
            yield _entry(json.JSONDecoder().raw_decode(text, position)[0])
        position = text.find("{", position + 1)


def _entry(value: Any) -> Entry:
    if not isinstance(value, dict) or value.keys() != {f.name for f in fields(Entry)}:
        raise ValueError("an entry has missing or unknown fields")
    for field in fields(Entry):
        kind, found = str(field.type), value[field.name]
        fits = isinstance(found, TYPES[kind]) and isinstance(found, bool) == (kind == "bool")
        if not fits or (kind == "int" and found < 0) or (kind == "float" and not 0 <= found < math.inf):
            raise ValueError(f"an entry's '{field.name}' is {found!r}")
    return Entry(**value)
