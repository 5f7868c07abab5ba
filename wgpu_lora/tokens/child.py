"""Child process that runs the library, driven over stdin and stdout by process.py.

A message consists of two lengths (`<IQ`), a JSON header, and a payload. The first message opens a document.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
from array import array
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from typing import Any, BinaryIO

LENGTHS = struct.Struct("<IQ")
Message = tuple[dict[str, Any], bytes]


def send(file: BinaryIO, header: dict[str, Any], payload: bytes = b"") -> None:
    stated = json.dumps(header).encode()
    file.write(LENGTHS.pack(len(stated), len(payload)) + stated)
    file.write(payload)
    file.flush()


def receive(file: BinaryIO, most: int | None = None) -> Message:
    """The next message; EOFError at the end, OverflowError if its payload has more than `most` bytes."""
    header, payload = LENGTHS.unpack(_exactly(file, LENGTHS.size))
    if most is not None and payload > most:
        raise OverflowError
    return json.loads(_exactly(file, header)), _exactly(file, payload)


def _exactly(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise EOFError
    return data


def limit(memory: int) -> None:
    """Limit this process's memory if the system can; a larger allocation ends the process."""
    try:
        import resource
    except ImportError:  # Windows, where the parent watches the memory in use
        return
    taken = 0  # address space that a preloaded library may have reserved
    with suppress(OSError, ValueError), open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    core = 1 if sys.platform == "linux" else 0  # byte; Linux ignores a limit of 0 where a program receives core dumps
    for kind, most in ((resource.RLIMIT_CORE, core), (resource.RLIMIT_AS, memory + taken)):
        hard = resource.getrlimit(kind)[1]
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        try:
            resource.setrlimit(kind, (value, value))
        except (ValueError, OSError):  # macOS cannot limit address space
            continue


def within(seconds: float) -> None:
    """Have the system end this process after this much CPU time; 0 removes the limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer requests until the parent is gone."""
    from wgpu_lora.tokens.backend import BackendError, Local

    opened: list[Local] = []

    def answer(header: dict[str, Any], payload: bytes) -> Message:
        kind = header["do"]
        if kind == "open":
            opened.append(Local.opened(payload.decode()))
            return asdict(opened[0].facts), b""
        backend = opened[0]
        if kind in ("encode", "offsets"):
            ends = header["ends"]
            texts = [payload[start:end].decode() for start, end in zip([0, *ends], ends, strict=False)]
            numbers = array("I")
            counts = []
            for text in texts:
                if kind == "encode":
                    [ids] = backend.encode([text], header["special"])
                    numbers.extend(ids)
                else:
                    [(ids, offsets)] = backend.encode_with_offsets([text])
                    numbers.extend(ids)
                    numbers.extend(chain.from_iterable(offsets))
                counts.append(len(ids))
            return {"counts": counts}, numbers.tobytes()
        if kind == "decode":
            ids = array("I", payload).tolist()
            return {}, backend.decode(ids, header["skip"]).encode()
        if kind == "id":
            return {"id": backend.token_to_id(payload.decode())}, b""
        return {}, backend.to_str().encode()

    while True:
        try:
            header, payload = receive(source)
        except EOFError:
            return
        within(header["seconds"])
        try:
            reply = answer(header, payload)
        except BackendError as error:
            reply = {"error": str(error)[:500].encode(errors="replace").decode()}, b""
        within(0)
        send(sink, *reply)


def main() -> None:
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # Discard what the library prints when it fails.
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    limit(int(sys.argv[2]))
    try:
        serve(source, sink)
    except (MemoryError, BrokenPipeError):
        os._exit(1)
