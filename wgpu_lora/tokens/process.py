"""A tokenizer in a child process, so that any failure, even a crash, is a BackendError here.

The child limits its own memory and CPU time (child.py). For systems without such limits, and for hangs, a thread here
watches it while it is busy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, cast

import psutil
import tokenizers

from wgpu_lora.assets import ROOT
from wgpu_lora.tokens.backend import Added, BackendError, Facts, Span
from wgpu_lora.tokens.child import Message, receive, send

MEMORY = 2 << 30  # bytes; a vocabulary of 262,000 tokens takes 0.3 GB, and the longest text 0.9 GB more
SECONDS = 5.0  # CPU time of a request,
SECONDS_PER_MIB = 10.0  # plus this per MiB of text; ordinary texts take at most one
SECONDS_TO_OPEN = 1.0  # per MiB of a document; the largest take a thirtieth of that
MAX_ANSWER = 32 << 20  # bytes of ids and offsets, or of a text; 2 MiB of single-letter tokens take 24
PATIENCE = 6.0  # ratio of wall-clock to CPU time, for busy machines
_TICK, _IDLE = 0.1, 5.0

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from wgpu_lora.tokens.child import main; main()"


class Child:
    """A Backend in a child process. If the child has ended, the next call starts another."""

    def __init__(self, document: str) -> None:
        self._document = document.encode()
        self._lock = threading.RLock()
        self._process: _Process | None = None
        self.facts = self._opened().facts

    def encode(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        return [numbers for _, numbers in self._encoded({"do": "encode", "special": special}, texts, 1)]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[Span]]]:
        return [
            (numbers[:count], list(zip(numbers[count::2], numbers[count + 1 :: 2], strict=True)))
            for count, numbers in self._encoded({"do": "offsets"}, texts, 3)
        ]

    def _encoded(self, request: dict[str, Any], texts: Sequence[str], each: int) -> Iterator[tuple[int, list[int]]]:
        """For each text, its number of tokens and `each` numbers per token."""
        data = [_bytes(text) for text in texts]
        header, payload = self._ask({**request, "ends": list(accumulate(map(len, data)))}, b"".join(data))
        numbers, start = array("I", payload), 0
        for count in header["counts"]:
            yield count, numbers[start : start + each * count].tolist()
            start += each * count

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        try:
            numbers = array("I", ids)
        except (OverflowError, TypeError) as error:
            raise BackendError(str(error)) from None
        return self._ask({"do": "decode", "skip": skip_special_tokens}, numbers.tobytes())[1].decode()

    def token_to_id(self, token: str) -> int | None:
        return self._ask({"do": "id"}, _bytes(token))[0]["id"]

    def to_str(self) -> str:
        return self._ask({"do": "to_str"}, seconds=self._to_open())[1].decode()

    def _to_open(self) -> float:
        return SECONDS + SECONDS_TO_OPEN * len(self._document) / (1 << 20)

    def _ask(self, header: dict[str, Any], payload: bytes = b"", seconds: float | None = None) -> Message:
        with self._lock:
            if seconds is None:
                seconds = SECONDS + SECONDS_PER_MIB * len(payload) / (1 << 20)
            return self._opened().ask(header, payload, seconds)

    def _opened(self) -> _Process:
        with self._lock:
            process = self._process
            if process is None or process.gone or process.owner != os.getpid():
                self._process, process = None, _Process(len(self._document))
                weakref.finalize(self, process.end)
                try:
                    found = process.ask({"do": "open"}, self._document, self._to_open())[0]
                except BaseException:
                    process.end()
                    raise
                process.facts = Facts(found["vocab_size"], tuple(Added(**token) for token in found["added"]))
                self._process = process
            return process


def _bytes(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise BackendError(str(error)) from None


class _Process:
    """One child process."""

    facts: Facts

    def __init__(self, size: int) -> None:
        self.size = size  # bytes of the document, which may be requested
        paths = [os.path.abspath(path) for path in sys.path]
        paths += [str(ROOT), str(Path(tokenizers.__file__).parent.parent)]
        options: dict[str, Any] = {"start_new_session": True}  # Ctrl-C must not reach the child
        if sys.platform == "win32":
            options = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW}
        try:
            self.popen = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _START, json.dumps(paths), str(MEMORY)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "RAYON_NUM_THREADS": "1",
                    "TOKENIZERS_PARALLELISM": "false",
                    "MALLOC_ARENA_MAX": "2",
                },
                **options,
            )
        except (OSError, ValueError) as error:
            raise BackendError(f"no process can be started for it: {error}") from None
        self.owner = os.getpid()
        self.gone = False
        self.watch = _Watch(self.popen)

    def ask(self, header: dict[str, Any], payload: bytes, seconds: float) -> Message:
        source, sink = cast(BinaryIO, self.popen.stdout), cast(BinaryIO, self.popen.stdin)
        try:
            self.watch.begin(seconds * PATIENCE)
            send(sink, {**header, "seconds": seconds}, payload)
            reply = receive(source, MAX_ANSWER + 8 * self.size)
            self.watch.rest()
        except OverflowError:
            self.end()
            raise BackendError("its output for a text is too large") from None
        except (OSError, EOFError, ValueError):
            code = self.end()
            raise BackendError(self._why(code, seconds)) from None
        except BaseException:  # an interrupt: the pending reply must not be taken for the next one
            self.end()
            raise
        if "error" in reply[0]:
            raise BackendError(reply[0]["error"])
        return reply

    def _why(self, code: int, seconds: float) -> str:
        import signal

        if self.watch.slow or code == -getattr(signal, "SIGPROF", 0):
            return f"it computed for more than {seconds:.0f} seconds"
        return f"it needs more than {MEMORY >> 30} GiB of memory or makes the tokenizers library fail"

    def end(self) -> int:
        """End the child, unless it is another process's, and return its exit code."""
        self.gone = True
        if self.owner != os.getpid():
            return 0
        self.watch.stop()
        self.popen.kill()
        for file in (self.popen.stdin, self.popen.stdout):
            with suppress(OSError):
                cast(BinaryIO, file).close()
        return self.popen.wait()


class _Watch(threading.Thread):
    """Kills a child that exceeds its time or memory; sleeps while the child is idle."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        super().__init__(name="wgpu-lora-tokenizer", daemon=True)
        self._popen = popen
        self._busy = threading.Event()
        self._until: float | None = None
        self._stopped = self.slow = False
        self.start()

    def begin(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        if not self._busy.is_set():
            self._busy.set()

    def rest(self) -> None:
        self._until = None

    def stop(self) -> None:
        self._stopped = True
        self._busy.set()

    def run(self) -> None:
        idle = 0.0
        while self._busy.wait() and not self._stopped:
            time.sleep(_TICK)
            until = self._until
            if until is not None:
                idle = 0.0
                self.slow = time.monotonic() > until
                if self.slow or self._resident() > MEMORY:
                    self._popen.kill()
                    return
                continue
            idle += _TICK
            if idle > _IDLE:
                self._busy.clear()
                if self._until is not None:  # a request began in between
                    self._busy.set()

    def _resident(self) -> int:
        try:
            return psutil.Process(self._popen.pid).memory_info().rss
        except psutil.Error:
            return 0
