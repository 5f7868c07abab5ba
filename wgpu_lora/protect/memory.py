"""Memory for secrets: pages of their own, locked against swapping (mlock, VirtualLock), that can be overwritten."""

from __future__ import annotations

import ctypes
import mmap
import sys
from contextlib import suppress
from typing import Any

LINUX, WINDOWS = sys.platform == "linux", sys.platform == "win32"


class SecretBuffer:
    """Bytes in pages of their own, which are locked against swapping where the system allows it, and can be wiped.

    On Linux they are also left out of core dumps and not given to children (MADV_DONTDUMP, MADV_DONTFORK).

    Attributes:
        locked: whether the pages cannot be swapped out.
    """

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._size = len(data)
        self._map: mmap.mmap | None = mmap.mmap(-1, max(1, self._size))
        for advice in ("MADV_DONTDUMP", "MADV_DONTFORK") if LINUX else ():
            self._map.madvise(getattr(mmap, advice))
        start = ctypes.c_char.from_buffer(self._map)
        self.locked = lock_pages(ctypes.addressof(start), len(self._map))
        del start
        self._map[: self._size] = data

    def __len__(self) -> int:
        return self._size

    def copy(self) -> bytes:
        """The bytes, as a copy that cannot be wiped. Raises ValueError after `wipe`."""
        if self._map is None:
            raise ValueError("the secret has been wiped")
        return self._map[: self._size]

    def wipe(self) -> None:
        """Overwrites the pages with zeros and gives them back."""
        if self._map is not None:
            self._map[:] = bytes(len(self._map))
            with suppress(BufferError):  # somebody looks at the pages, which are zeros now
                self._map.close()  # unlocks, too
            self._map = None


def system_library() -> Any:
    """The C library of the process, or kernel32 on Windows."""
    if WINDOWS:
        return ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined,unused-ignore]
    return ctypes.CDLL(None, use_errno=True)


def lock_pages(address: int, size: int) -> bool:
    """Locks the pages that hold these bytes in memory; whether the system allowed it."""
    system, at, length = system_library(), ctypes.c_void_p(address), ctypes.c_size_t(size)
    return bool(system.VirtualLock(at, length)) if WINDOWS else system.mlock(at, length) == 0
