"""Output streams that survive the loss of their reader, and characters that their encoding lacks."""

from __future__ import annotations

import errno
import io
import os
from typing import Any

GONE = (errno.EPIPE, errno.EIO, errno.ESHUTDOWN)  # a pipe without a reader, a closed terminal
FAILING = ("strict", "surrogateescape")  # Python's defaults; both raise for text that cannot be encoded


class _Lasting(io.FileIO):
    """A stream that discards output once its reader has gone, so that a closed terminal does not end a run."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def discard_when_closed(stream: Any) -> Any:
    """Wrap a stream so that output is discarded once its reader has gone.

    Characters that its encoding lacks are escaped, as in "\\u0142", unless PYTHONIOENCODING names another handler.
    """
    try:
        number = stream.fileno()
    except (AttributeError, OSError, ValueError):  # closed before the start, or not a file
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Lasting(number, "w", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace" if stream.errors in FAILING else stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
