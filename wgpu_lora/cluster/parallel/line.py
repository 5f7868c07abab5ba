"""A socket on which a worker process of this machine calls."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from wgpu_lora.errors import UserError

LONGEST = 70  # bytes of the directory for temporary files: addresses of such sockets have about 100 at most
LOOK = 0.2  # seconds between looks at whether it will still call


class Line:
    """A listening socket for one call, in a directory that only this user can enter.

    Raises:
        UserError: this system has no such sockets.
    """

    def __init__(self) -> None:
        if not hasattr(socket, "AF_UNIX"):
            raise UserError("Data-parallel training needs Unix sockets, which this system lacks: use one device.")
        long = len(os.fsencode(tempfile.gettempdir())) > LONGEST
        self._directory = tempfile.mkdtemp(prefix="wgpu-lora-", dir="/tmp" if long else None)
        self.address = os.path.join(self._directory, "line")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.address)
        self._socket.listen(1)
        self._socket.settimeout(LOOK)

    def call(self, coming: Callable[[], bool], seconds: float | None = None) -> Connection | None:
        """Wait for the call while it is `coming`, or so many seconds at most; None if it does not come."""
        end = None if seconds is None else time.monotonic() + seconds
        while coming() and (end is None or time.monotonic() < end):
            try:
                called, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:  # it was closed
                return None
            self.close()  # there is no other call, and a process that is killed should leave nothing behind
            called.setblocking(True)
            return Connection(called.detach())
        return None

    def close(self) -> None:
        """Hang up; a call that has come goes on."""
        self._socket.close()
        shutil.rmtree(self._directory, ignore_errors=True)
