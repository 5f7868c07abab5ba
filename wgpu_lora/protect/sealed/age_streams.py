"""Sealed data: files of the age format (age-encryption.org/v1) for X25519 recipients, as the `age` program does.

A sealed file is a header (a file key, wrapped to each recipient, and a MAC over all of it) and chunks of 64 KiB, each
authenticated with its position and whether it is the last (ChaCha20-Poly1305 in the STREAM construction). So any
change is found before a byte of the changed chunk is given out, and a missing end when the end is reached.

age says nothing about who sealed: anybody can seal to a recipient. Sealed files are believed by their digest only.
"""

from __future__ import annotations

import _thread
import binascii
import io
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import pyrage
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from wgpu_lora.errors import UserError
from wgpu_lora.files.json_files import small_file
from wgpu_lora.protect.sealed.keys import MAX_KEY_BYTES, DataKey

if TYPE_CHECKING:
    from _typeshed import SupportsRead, SupportsWrite

VERSION, ARMOR = b"age-encryption.org/v1\n", b"-----BEGIN AGE ENCRYPTED FILE-----"
# pyrage reads a header again from its start for each piece that arrives, so 16,000 short stanzas take it two minutes.
MAX_HEADER, MAX_LINES = 64 << 10, 1024  # bytes; a recipient takes about 100, in two lines
MAX_RECIPIENTS = 256
START = 2 * MAX_HEADER  # bytes that hold a whole header, in armor too
STOPPING = 5.0  # seconds that a call of `read` or `write` may go on after an interrupt
BECH32 = str.maketrans("qpzry9x8gf2tvdw0s3jn54khce6mua7l", "0123456789abcdefghijklmnopqrstuv")  # BIP 173
EXAMPLE = "age1..., which wgpu-lora protect keygen prints"


class TamperedError(UserError):
    """A sealed file that is damaged, or that this key does not open."""


# -- recipients --------------------------------------------------------------------------------------------------------


def parse_recipient(text: str) -> pyrage.x25519.Recipient:
    """An age recipient.

    Raises:
        pyrage.RecipientError: it is none, or a point of low order (RFC 7748, 6.1): anybody could open what is sealed
            to it, and pyrage would panic.
    """
    recipient = pyrage.x25519.Recipient.from_str(text)
    point = int(str(recipient)[4:-6].translate(BECH32), 32) >> 4  # 52 digits of 5 bits
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(point.to_bytes(32, "big")))
    except ValueError:
        raise pyrage.RecipientError("a point of low order") from None
    return recipient


def parse_recipients(recipients: Sequence[str]) -> list[pyrage.x25519.Recipient]:
    """pyrage's recipients, each once. Raises UserError: there is none, or one is not an age X25519 recipient."""
    unique = list(dict.fromkeys(recipients))
    if len(unique) > MAX_RECIPIENTS:
        raise UserError(f"A file can be sealed to at most {MAX_RECIPIENTS} recipients: give fewer.")
    if not unique:
        raise UserError(f"Nobody could open what is sealed to nobody: give a recipient, {EXAMPLE}.")
    if any(text.upper().startswith("AGE-SECRET-KEY-") for text in unique):  # it must not be repeated in a message
        raise UserError(f"A private key was given as a recipient: give the public half, {EXAMPLE}.")
    parsed = []
    for text in unique:
        try:
            parsed.append(parse_recipient(text))
        except pyrage.RecipientError:
            raise UserError(f"{text!a:.80} is not an age X25519 recipient: give {EXAMPLE}.") from None
    return parsed


def read_recipients(path: str | Path) -> list[str]:
    """The recipients in a recipients file of age: one on each line, with comments that start with "#".

    Raises:
        UserError: the file cannot be read or holds no recipient, or something else.
    """
    text = small_file(path, "The recipients file", MAX_KEY_BYTES).decode("utf-8", "replace")
    recipients = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    if not recipients:
        raise UserError(f"{path} holds no recipient: write {EXAMPLE}, on a line of its own.")
    parse_recipients(recipients)
    return recipients


# -- sealing and opening -----------------------------------------------------------------------------------------------


def seal_stream(reader: SupportsRead[bytes], writer: SupportsWrite[bytes], recipients: Sequence[str]) -> None:
    """Seals what `reader` gives, piece by piece, in memory that does not grow with it. Raises UserError: a recipient is
    not one. What `reader` or `writer` raises."""
    to, source, target = parse_recipients(recipients), _StreamEnd(reader), _StreamEnd(writer)
    try:
        _run_in_thread(lambda: pyrage.encrypt_io(source, target, to), source, target)
    finally:
        _reraise(source, target)  # pyrage 1.4 says nothing if its last write fails


def unseal_stream(
    reader: SupportsRead[bytes], writer: SupportsWrite[bytes], key: DataKey, where: str = "The sealed data"
) -> None:
    """Opens what `reader` gives, piece by piece. A chunk reaches `writer` after it has been authenticated.

    Chunks before a damaged one have been written when it is found: whoever uses them must drop them on an error.

    Args:
        where: start of messages, such as a path.

    Raises:
        TamperedError: it is damaged or incomplete, sealed to another key, or not an age file.
        What `reader` or `writer` raises.
    """
    source, target = _StreamEnd(_AgeReader(reader, where)), _StreamEnd(writer)
    try:
        _run_in_thread(lambda: pyrage.decrypt_io(source, target, [key.identity()]), source, target)
    except BaseException as failure:
        _reraise(source, target)
        if "No matching keys" in str(failure):
            raise TamperedError(
                f"{where} cannot be opened with the key of {key.recipient}: give the key of one of its recipients."
            ) from None
        # A fault in the library, which panics then, must not look like success or a crash.
        if isinstance(failure, pyrage.DecryptError | OSError) or type(failure).__name__ == "PanicException":
            raise TamperedError(
                f"{where} cannot be opened, because it is damaged, incomplete, or not an age file ({failure!s:.100}): "
                "copy it again."
            ) from None
        raise
    _reraise(source, target)


def seal_bytes(data: bytes, recipients: Sequence[str]) -> bytes:
    """Seals bytes in memory. Raises UserError if a recipient is not one."""
    return pyrage.encrypt(data, parse_recipients(recipients))  # type: ignore[no-any-return]


def unseal_bytes(data: bytes | bytearray, key: DataKey, where: str = "The sealed data") -> bytearray:
    """Opens sealed bytes into memory alone, all or nothing.

    The result, and what had been opened before an error was found, can be overwritten, and the latter is. Pieces of
    8 KiB pass through Python's immutable bytes on the way, one after the other, and cannot be.

    Raises:
        TamperedError: as `unseal_stream`.
    """
    buffer = bytearray(len(data))  # more than what is in it, so that it never moves and leaves a copy behind
    into = _BufferWriter(buffer)
    try:
        unseal_stream(io.BytesIO(data), into, key, where)
    except BaseException:
        into.view[:] = bytes(len(buffer))
        raise
    size = into.size
    if 2 * size > len(buffer):  # then bytearray shrinks in place
        into.view.release()
        del buffer[size:]
        return buffer
    short = bytearray(into.view[:size])
    into.view[:] = bytes(len(buffer))
    return short


class _BufferWriter:
    """A writer into a buffer of a fixed size."""

    def __init__(self, buffer: bytearray) -> None:
        self.view, self.size = memoryview(buffer), 0

    def write(self, data: bytes) -> int:
        self.view[self.size : self.size + len(data)] = data
        self.size += len(data)
        return len(data)


class _AgeReader:
    """A reader of an age file whose header is not larger than ours can be."""

    def __init__(self, reader: SupportsRead[bytes], where: str) -> None:
        begin = b""
        while len(begin) < START and (piece := reader.read(START - len(begin))):
            begin += piece
        self._reader, self._start = reader, io.BytesIO(begin)
        if begin.startswith(ARMOR):
            text = b"".join(line for line in begin.splitlines() if not line.startswith(b"-"))
            with suppress(binascii.Error):  # pyrage says so, too
                begin = binascii.a2b_base64(text[: len(text) // 4 * 4])
        if not begin.startswith(VERSION):
            raise TamperedError(f"{where} cannot be opened, because it is not an age file: give a sealed file.")
        header = begin.partition(b"\n---")[0]
        if len(header) > MAX_HEADER or header.count(b"\n") > MAX_LINES:
            raise TamperedError(
                f"{where} cannot be opened, because its header is larger than one for {MAX_RECIPIENTS} recipients: "
                "seal it to fewer."
            )

    def read(self, size: int = -1) -> bytes:
        return self._start.read(size) or self._reader.read(size)


class _StreamEnd:
    """One end of a stream, which keeps its own failure apart from pyrage's: both can be OSError."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.stopped = inner, False
        self.failure: BaseException | None = None

    def _call(self, call: Callable[[], Any]) -> Any:
        if self.stopped:
            raise BrokenPipeError  # Rust would call again after an InterruptedError, without end
        try:
            return call()
        except BaseException as failure:
            self.failure = self.failure or failure
            raise

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._call(lambda: self.inner.read(size))
        return data

    def write(self, data: bytes) -> int:
        # A raw file may take less than it is given; None is from a writer that takes all.
        count = self._call(lambda: self.inner.write(data))
        return len(data) if count is None else int(count)

    def flush(self) -> None:
        self._call(getattr(self.inner, "flush", lambda: None))


def _run_in_thread(work: Callable[[], None], *ends: _StreamEnd) -> None:
    """Runs pyrage in a thread of its own, where no signal handler can raise.

    In this thread, a handler could raise during a call of `read` or `write` but outside of its error handling; pyrage
    drops such errors, or reports them as its own. An interrupt of this thread stops the other at its next call.
    """
    results = SimpleQueue[BaseException | None]()

    def run() -> None:
        try:
            work()
            results.put(None)
        except BaseException as error:
            results.put(error)

    try:
        _thread.start_new_thread(run, ())  # waits of `threading` are not safe against interrupts
        result = results.get()
    except BaseException:
        for end in ends:
            end.stopped = True
        with suppress(Empty):
            results.get(timeout=STOPPING)
        raise
    if result is not None:
        raise result


def _reraise(*ends: _StreamEnd) -> None:
    """Raises what an end of a stream raised, instead of how pyrage says it."""
    for end in ends:
        if end.failure is not None:
            raise end.failure
