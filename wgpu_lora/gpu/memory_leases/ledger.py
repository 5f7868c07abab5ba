"""The record of memory leases on a device, for all processes of one user, or of users who share a directory."""

from __future__ import annotations

import gc
import json
import math
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from platformdirs import user_state_dir

from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import write_bytes_atomic
from wgpu_lora.processes.process_identity import boot_id, host_id, process_start

if TYPE_CHECKING:
    from wgpu_lora.gpu.device_list import DeviceInfo


LOCK_SECONDS = 30.0  # a change takes milliseconds
FIRST_PAUSE, LAST_PAUSE = 0.002, 0.05  # seconds between attempts to take the lock


class GarbageCollectionPaused:
    """Turns garbage collection off while any thread is in the block: it may end other leases of this process, and these
    would wait for a lock that their own thread holds."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # garbage may be collected in `__enter__`
        self._inside, self._before = 0, True

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._before:
                gc.enable()


_UNCOLLECTED = GarbageCollectionPaused()


def share_directory() -> Path:
    """Directory of the ledgers: WGPU_LORA_SHARE_DIR, else in the user's state directory."""
    override = os.environ.get("WGPU_LORA_SHARE_DIR")
    return Path(override) if override else Path(user_state_dir("wgpu-lora")) / "share"


def device_key(info: DeviceInfo, listed: Sequence[DeviceInfo] | None = None) -> str:
    """A name for a physical device among those `listed` (default: all): kind, model, and index among equal models.

    A device that is listed by several backends or drivers, or with a driver name in brackets, gets the same key.
    """
    if listed is None:
        from wgpu_lora.gpu.device_list import list_devices

        listed = list_devices()

    def model(a: DeviceInfo) -> str:
        return " ".join(re.sub(r"\(.*?\)", " ", a.name).split())

    def listing(a: DeviceInfo) -> tuple[str, ...]:
        return a.kind, model(a), a.backend, a.driver

    number = sum(listing(a) == listing(info) and a.index < info.index for a in listed)
    return f"{info.kind} {model(info)} {number}"


@dataclass(frozen=True)
class Repair:
    """Result of a repair: the entries of living owners, and the new path of the damaged file."""

    entries: list[LedgerEntry]
    damaged: Path


class Ledger:
    """One device's entries on disk: leases, and the queue in order. A missing file is an empty ledger.

    Changes are made under a lock file beside it, which the system releases when its holder dies, and which is never
    replaced, so that no two processes can lock different files. The ledger itself is replaced atomically.

    Args:
        device: the device's key, see `device_key`.
        directory: by default `share_directory()`.
    """

    def __init__(self, device: str, directory: Path | None = None):
        self.directory = directory or share_directory()
        self.path = self.directory / f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"
        self._lock = FileLock(self.path.with_suffix(".lock"))  # each thread's own

    @classmethod
    def all(cls, directory: Path | None = None) -> list[Ledger]:
        """All ledgers in a directory."""
        return [cls(path.stem, directory) for path in sorted((directory or share_directory()).glob("*.json"))]

    def read(self) -> list[LedgerEntry]:
        """All entries, including those of dead owners. Raises UserError if the file is damaged or unreadable."""
        try:
            return parse(self._content())
        except ValueError as error:
            raise UserError(
                f"The ledger {self.path} is damaged ({error}), so nothing can be allocated on this device: rebuild it "
                "with 'wgpu-lora share repair'."
            ) from error

    @contextmanager
    def changing(self) -> Iterator[list[LedgerEntry]]:
        """Yield the entries of living owners as a list, under the lock, and write the list back if it was changed.

        Raises UserError if the ledger is damaged, cannot be written, or stays locked for LOCK_SECONDS.
        """
        with self._locked():
            before = self.read()
            entries = [entry for entry in before if not entry.dead]
            yield entries
            if entries != before:
                self._write(self.path, dump(entries))

    def repair(self) -> Repair | None:
        """Rebuild a damaged ledger from its intact entries; None if it is not damaged.

        The damaged file is kept beside it. Leases that cannot be read return when their owners renew them.
        Raises UserError.
        """
        with self._locked():
            content = self._content()
            try:
                parse(content)
                return None
            except ValueError:
                entries = [entry for entry in salvage(content) if not entry.dead]
            names = (self.path.with_name(f"{self.path.name}.damaged-{n}") for n in count(1))
            damaged = next(name for name in names if not name.exists())
            self._write(damaged, content)  # first, since a missing ledger would count as empty
            self._write(self.path, dump(entries))
            return Repair(entries, damaged)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self._acquire()
            yield
        finally:
            if self._lock.is_locked:
                self._lock.release(force=True)
                _UNCOLLECTED.__exit__()

    def _acquire(self) -> None:
        end, pause = time.monotonic() + LOCK_SECONDS, FIRST_PAUSE
        while not self._take():
            if time.monotonic() >= end:
                raise UserError(
                    f"The ledger {self.path} has been locked by another process for {LOCK_SECONDS:.0f} s: find it with "
                    "'wgpu-lora share status', and end it if it hangs."
                )
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)

    def _take(self) -> bool:
        """Take the lock, unless another has it.

        Garbage is not collected while it is held. While others are waited for, it is: many threads that wait in turn
        would keep it for good, and with it the devices and leases that they wait for.
        """
        with ExitStack() as stack:
            stack.enter_context(_UNCOLLECTED)  # before the lock is taken
            stack.callback(self._lock.release, force=True)  # also if it was taken, but then something raised
            try:
                self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                Path(self._lock.lock_file).touch()  # FileLock takes directories without files for locked ones
                self._lock.acquire(blocking=False)
                self._share_lock()
            except Timeout:
                return False
            except OSError as error:
                raise self._unusable(error) from error
            stack.pop_all()
        return True

    def _share_lock(self) -> None:
        """Let other users lock the ledger if they may write to its directory."""
        lock = Path(self._lock.lock_file)
        result = lock.stat()
        if os.name != "nt" and self.directory.stat().st_mode & 0o022 and result.st_uid == os.getuid():
            lock.chmod(result.st_mode | 0o666)

    def _content(self) -> bytes:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return dump([])
        except OSError as error:
            raise self._unusable(error) from error

    def _write(self, path: Path, content: bytes) -> None:
        try:
            for temporary in self.directory.glob(f".{self.path.name}.*.tmp"):  # left by a killed process
                temporary.unlink()
            write_bytes_atomic(path, content)
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> UserError:
        return UserError(
            f"The ledger {self.path} cannot be used ({error.strerror or error}): fix that, or set WGPU_LORA_SHARE_DIR "
            "to another directory."
        )


SCHEMA = 1
TYPES: dict[str, Any] = {"str": str, "int": int, "float": (int, float), "bool": bool}
# Owners renew at least this often: holders on a timer, waiters each time they look.
RENEW_SECONDS = 30.0
FORGET_SECONDS = 4 * RENEW_SECONDS


@dataclass(frozen=True)
class LedgerEntry:
    """Device memory that one run holds or waits for.

    Attributes:
        bytes: device memory; 0 for a lease that was released by hand while its owner lives.
        what: purpose, in a few words.
        holds: True for a lease, False for a place in the queue.
        since: when it began to hold or to wait; renewed: when its owner last renewed it. Seconds since 1970.
        host, pid, started, boot_id: the owner, as identified by `process_identity`.
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
    def of_this_process(cls, nbytes: int, purpose: str, *, holds: bool = False) -> LedgerEntry:
        now, pid = time.time(), os.getpid()
        started = process_start(pid)
        assert started is not None
        return cls(uuid.uuid4().hex[:8], nbytes, purpose, holds, now, now, host_id(), pid, started, boot_id())

    @property
    def dead(self) -> bool:
        """Whether the owner has ended.

        On this host this is exact: a suspended process keeps its memory even though it does not renew. Processes of
        other hosts and containers are not visible, and count as dead after FORGET_SECONDS without renewal.
        """
        if self.host != host_id():
            return time.time() - self.renewed > FORGET_SECONDS
        return self.boot_id != boot_id() or process_start(self.pid) != self.started

    @property
    def is_of_this_host(self) -> bool:
        """Whether the entry is of this machine: machines that share a home directory share the ledger file."""
        return self.boot_id == boot_id()

    @property
    def owner(self) -> str:
        """The owner, for messages."""
        return f"pid {self.pid}{'' if self.host == host_id() else f' on {self.host}'} ({self.what})"


def dump(entries: list[LedgerEntry]) -> bytes:
    return (json.dumps({"schema": SCHEMA, "entries": [asdict(e) for e in entries]}, indent=1) + "\n").encode()


def parse(data: bytes) -> list[LedgerEntry]:
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


def salvage(data: bytes) -> list[LedgerEntry]:
    """Find all intact entries in a damaged ledger."""
    return list({entry.id: entry for entry in _salvaged(data.decode(errors="replace"))}.values())


def _salvaged(text: str) -> Iterator[LedgerEntry]:
    position = text.find("{")
    while position >= 0:
        with suppress(ValueError, RecursionError):
            yield _entry(json.JSONDecoder().raw_decode(text, position)[0])
        position = text.find("{", position + 1)


def _entry(value: Any) -> LedgerEntry:
    if not isinstance(value, dict) or value.keys() != {f.name for f in fields(LedgerEntry)}:
        raise ValueError("an entry has missing or unknown fields")
    for field in fields(LedgerEntry):
        kind, result = str(field.type), value[field.name]
        fits = isinstance(result, TYPES[kind]) and isinstance(result, bool) == (kind == "bool")
        if not fits or (kind == "int" and result < 0) or (kind == "float" and not 0 <= result < math.inf):
            raise ValueError(f"an entry's '{field.name}' is {result!r}")
    return LedgerEntry(**value)
