"""A ledger's entries: who holds or waits for how much, as JSON and back."""

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
# Owners renew this often: a holder by the clock, a waiter whenever it looks, which is no less often.
RENEW_SECONDS = 30.0
FORGET_SECONDS = 4 * RENEW_SECONDS


@dataclass(frozen=True)
class Entry:
    """One run's part of a device: memory that it holds, or waits for.

    Attributes:
        bytes: of device memory; 0 where a person has released a lease whose owner lives.
        what: what it is for, a few words.
        holds: a lease if true, else a place in the queue.
        since: when it began to hold or to wait; renewed: when its owner last said so. Seconds since 1970.
        host, pid, started, boot_id: the owner, as share.owner names it.
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
        """Whether its owner has ended.

        Of this host that is known: a suspended or stopped process keeps its memory however long it does not renew.
        Another host's processes, and those of another container, cannot be seen: they are dead once they have not
        renewed for FORGET_SECONDS.
        """
        if self.host != host_id():
            return time.time() - self.renewed > FORGET_SECONDS
        return self.boot_id != boot_id() or start_of(self.pid) != self.started

    @property
    def here(self) -> bool:
        """Whether it is about this machine's device: machines that share a home directory share the ledger's file."""
        return self.boot_id == boot_id()

    @property
    def who(self) -> str:
        """The owner as a person reads it."""
        return f"pid {self.pid}{'' if self.host == host_id() else f' on {self.host}'} ({self.what})"


def dump(entries: list[Entry]) -> bytes:
    return (json.dumps({"schema": SCHEMA, "entries": [asdict(e) for e in entries]}, indent=1) + "\n").encode()


def parse(data: bytes) -> list[Entry]:
    """The entries of a ledger. Raises ValueError, saying what is wrong, for anything but what `dump` writes."""
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
        raise ValueError("two entries have one id")
    return entries


def salvage(data: bytes) -> list[Entry]:
    """Every whole entry in the bytes of a damaged ledger."""
    return list({entry.id: entry for entry in _salvaged(data.decode(errors="replace"))}.values())


def _salvaged(text: str) -> Iterator[Entry]:
    position = text.find("{")
    while position >= 0:
        with suppress(ValueError, RecursionError):
            yield _entry(json.JSONDecoder().raw_decode(text, position)[0])
        position = text.find("{", position + 1)


def _entry(value: Any) -> Entry:
    if not isinstance(value, dict) or value.keys() != {f.name for f in fields(Entry)}:
        raise ValueError("an entry has other fields than it should")
    for field in fields(Entry):
        kind, found = str(field.type), value[field.name]
        fits = isinstance(found, TYPES[kind]) and isinstance(found, bool) == (kind == "bool")
        if not fits or (kind == "int" and found < 0) or (kind == "float" and not 0 <= found < math.inf):
            raise ValueError(f"an entry's '{field.name}' is {found!r}")
    return Entry(**value)
