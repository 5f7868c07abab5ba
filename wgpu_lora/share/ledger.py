"""The record of memory leases on a device, for all processes of one user, or of users who share a directory."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout
from platformdirs import user_state_dir

from wgpu_lora.atomic import write_bytes_atomic
from wgpu_lora.errors import UserError
from wgpu_lora.share.entry import Entry, dump, parse, salvage

if TYPE_CHECKING:
    from wgpu_lora.gpu.devices import DeviceInfo

LOCK_SECONDS = 30.0  # a change takes milliseconds
FIRST_PAUSE, LAST_PAUSE = 0.002, 0.05  # seconds between attempts to take the lock


class _Uncollected:
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


_UNCOLLECTED = _Uncollected()


def share_directory() -> Path:
    """Directory of the ledgers: WGPU_LORA_SHARE_DIR, else in the user's state directory."""
    named = os.environ.get("WGPU_LORA_SHARE_DIR")
    return Path(named) if named else Path(user_state_dir("wgpu-lora")) / "share"


def device_key(info: DeviceInfo, listed: Sequence[DeviceInfo] | None = None) -> str:
    """A name for a physical device among those `listed` (default: all): kind, model, and index among equal models.

    A device that is listed by several backends or drivers, or with a driver name in brackets, gets the same key.
    """
    if listed is None:
        from wgpu_lora.gpu.devices import list_devices

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

    kept: list[Entry]
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

    def read(self) -> list[Entry]:
        """All entries, including those of dead owners. Raises UserError if the file is damaged or unreadable."""
        try:
            return parse(self._content())
        except ValueError as error:
            raise UserError(
                f"The ledger {self.path} is damaged ({error}), so nothing can be allocated on this device: rebuild it "
                "with 'wgpu-lora share repair'."
            ) from error

    @contextmanager
    def changing(self) -> Iterator[list[Entry]]:
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
                kept = [entry for entry in salvage(content) if not entry.dead]
            names = (self.path.with_name(f"{self.path.name}.damaged-{n}") for n in count(1))
            damaged = next(name for name in names if not name.exists())
            self._write(damaged, content)  # first, since a missing ledger would count as empty
            self._write(self.path, dump(kept))
            return Repair(kept, damaged)

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
        found = lock.stat()
        if os.name != "nt" and self.directory.stat().st_mode & 0o022 and found.st_uid == os.getuid():
            lock.chmod(found.st_mode | 0o666)

    def _content(self) -> bytes:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return dump([])
        except OSError as error:
            raise self._unusable(error) from error

    def _write(self, path: Path, content: bytes) -> None:
        try:
            for left in self.directory.glob(f".{self.path.name}.*.tmp"):  # left by a killed process
                left.unlink()
            write_bytes_atomic(path, content)
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> UserError:
        return UserError(
            f"The ledger {self.path} cannot be used ({error.strerror or error}): fix that, or set WGPU_LORA_SHARE_DIR "
            "to another directory."
        )
