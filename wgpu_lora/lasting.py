"""Streams that outlive their readers."""

from __future__ import annotations

import errno
import io
import os
from typing import Any

GONE = (errno.EPIPE, errno.EIO, errno.ESHUTDOWN)  # a pipe that nobody reads any more, a terminal that closed


class _Lasting(io.FileIO):
    """A stream that goes silent when whoever read it has gone: losing a terminal is not losing a run."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def lasting(stream: Any) -> Any:
    """The same stream, but for what nobody reads any more."""
    try:
        number = stream.fileno()
    except (AttributeError, OSError, ValueError):  # closed before the start, or no file
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Lasting(number, "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
