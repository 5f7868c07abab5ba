"""Sealed files that somebody changed: all are refused, and of a damaged chunk no byte is given out."""

from __future__ import annotations

import io
import os
import re
import time
from base64 import b64encode
from collections.abc import Iterable

import pyrage
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from wgpu_lora.errors import UserError
from wgpu_lora.protect.sealed.age_streams import MAX_RECIPIENTS, TamperedError, seal_bytes, unseal_bytes, unseal_stream
from wgpu_lora.protect.sealed.keys import DataKey

KEY, OTHER = DataKey.generate(), DataKey.generate()
BOTH = [KEY.recipient, OTHER.recipient]
CHUNK, TAG, NONCE = 64 << 10, 16, 16
SEALED_CHUNK = CHUNK + TAG
STANZA = re.compile(rb"-> [^\n]*\n(?:[^\n]{64}\n)*[^\n]{0,63}\n")
HEADER = re.compile(
    rb"(?P<version>age-encryption\.org/v1\n)(?P<stanzas>(?:" + STANZA.pattern + rb")+)(?P<mac>--- [^\n]{43}\n)"
)
DATA = os.urandom(2 * CHUNK + 1000)
SEALED = seal_bytes(DATA, BOTH)
SMALL = seal_bytes(DATA[:100], BOTH)


def header_size(sealed: bytes) -> int:
    return sealed.index(b"\n", sealed.index(b"\n--- ") + 1) + 1


def parts(sealed: bytes) -> tuple[bytes, list[bytes]]:
    """Header with nonce, and chunks."""
    start = header_size(sealed) + NONCE
    return sealed[:start], [sealed[at : at + SEALED_CHUNK] for at in range(start, len(sealed), SEALED_CHUNK)]


def joined(head: bytes, chunks: Iterable[bytes]) -> bytes:
    return head + b"".join(chunks)


def refused(sealed: bytes, data: bytes = DATA, key: DataKey = KEY) -> int:
    """Checks that a damaged file is refused, and returns how many bytes were given out before: whole chunks of it."""
    written = io.BytesIO()
    with pytest.raises(TamperedError):
        unseal_stream(io.BytesIO(sealed), written, key)
    given = written.getvalue()
    assert data.startswith(given)
    assert len(given) % CHUNK == 0
    return len(given)


def flipped(sealed: bytes, at: int, bits: int = 1) -> bytes:
    changed = bytearray(sealed)
    changed[at] ^= bits
    return bytes(changed)


def test_the_files_here_are_whole() -> None:
    for key in (KEY, OTHER):
        assert unseal_bytes(SEALED, key) == DATA
    found = HEADER.match(SEALED)
    assert found is not None
    assert found.end() == header_size(SEALED)
    assert len(parts(SEALED)[1]) == 3


@pytest.mark.parametrize("key", [KEY, OTHER], ids=["first recipient", "second recipient"])
def test_every_bit_of_the_header_and_nonce(key: DataKey) -> None:
    """The version line, types, shares and bodies of all stanzas (also those of others), the MAC and the nonce."""
    for at in range(header_size(SMALL) + NONCE):
        for bit in range(8):
            assert refused(flipped(SMALL, at, 1 << bit), DATA[:100], key) == 0


def test_every_bit_of_a_small_payload() -> None:
    for at in range(header_size(SMALL) + NONCE, len(SMALL)):
        assert refused(flipped(SMALL, at, 1 << at % 8), DATA[:100]) == 0


@pytest.mark.parametrize("number", [0, 1, 2])
def test_bodies_and_tags_of_chunks(number: int) -> None:
    head, chunks = parts(SEALED)
    start, size = len(head) + number * SEALED_CHUNK, len(chunks[number])
    body, tag = (0, 1, size // 2, size - TAG - 1), range(size - TAG, size)
    for at in (*body, *tag):
        assert refused(flipped(SEALED, start + at)) == number * CHUNK


def test_stanzas_removed_doubled_exchanged_or_added() -> None:
    found = HEADER.match(SMALL)
    assert found is not None
    stanzas = STANZA.findall(found["stanzas"])
    assert len(stanzas) >= 2
    others = HEADER.match(seal_bytes(DATA[:100], BOTH))
    assert others is not None
    stranger = STANZA.findall(others["stanzas"])[0]
    for changed in (stanzas[1:], [stanzas[0], *stanzas], stanzas[::-1], [*stanzas, stranger], [stranger, *stanzas], []):
        if changed != stanzas:
            sealed = found["version"] + b"".join(changed) + found["mac"] + SMALL[found.end() :]
            assert refused(sealed, DATA[:100]) == 0
    for version in (b"age-encryption.org/v2\n", b"age-encryption.org/v1\r\n", b"", b"age-encryption.org/v1 \n"):
        assert refused(version + SMALL[found.end("version") :], DATA[:100]) == 0


def test_chunks_dropped_doubled_and_exchanged() -> None:
    head, (a, b, c) = parts(SEALED)
    expected = {
        (b, c): 0, (a, c): 1, (a, b): 2, (c,): 0, (a,): 1, (): 0,
        (a, a, b, c): 1, (a, b, b, c): 2, (a, b, c, c): 2,
        (b, a, c): 0, (a, c, b): 1, (c, b, a): 0, (b, c, a): 0,
    }  # fmt: skip
    for chunks, whole in expected.items():
        assert refused(joined(head, chunks)) <= whole * CHUNK, len(chunks)


def test_chunks_of_other_files_sealed_to_the_same_key() -> None:
    head, chunks = parts(SEALED)
    for others in (seal_bytes(DATA, BOTH), seal_bytes(DATA, [KEY.recipient])):
        other_head, other_chunks = parts(others)
        for number in range(3):
            mixed = [*chunks[:number], other_chunks[number], *chunks[number + 1 :]]
            assert refused(joined(head, mixed)) == number * CHUNK
        assert refused(joined(other_head, chunks)) == 0
        assert refused(joined(head[:-NONCE] + other_head[-NONCE:], chunks)) == 0
        assert refused(joined(head[:-NONCE] + other_head[-NONCE:], other_chunks)) == 0


@pytest.mark.parametrize("size", [0, 1, CHUNK, 2 * CHUNK, 2 * CHUNK + 1000])
def test_files_cut_off_at_every_boundary_and_beside_it(size: int) -> None:
    sealed = seal_bytes(DATA[:size], BOTH)
    head = len(parts(sealed)[0])
    boundaries = {0, 1, header_size(sealed), head, len(sealed)}
    boundaries |= {m.start() + 1 for m in re.finditer(b"\n", sealed[:head])}
    boundaries |= {head + n * SEALED_CHUNK - part for n in range(4) for part in (0, TAG)}
    for boundary in boundaries:
        for at in (boundary - 1, boundary, boundary + 1):
            if 0 <= at < len(sealed):
                given = refused(sealed[:at], DATA[:size])
                assert given <= max(0, at - head) // SEALED_CHUNK * CHUNK


@pytest.mark.parametrize("size", [0, 100, CHUNK, 2 * CHUNK])
def test_files_that_are_continued(size: int) -> None:
    sealed = seal_bytes(DATA[:size], BOTH)
    _, (*_, last) = parts(SEALED)
    for more in (b"\0", b"\n", bytes(TAG), bytes(SEALED_CHUNK), last, SEALED, sealed):
        refused(sealed + more, DATA[:size])
    refused(b"\n" + sealed, DATA[:size])


def test_other_keys_and_files_that_are_not_sealed() -> None:
    stranger = DataKey.generate()
    with pytest.raises(TamperedError, match="cannot be opened with the key of age1"):
        unseal_bytes(SEALED, stranger)
    for bad in (b"", b"{}\n" * 100, b"\0" * 1000, b"age-encryption.org/v1\n", KEY.file_text()):
        with pytest.raises(TamperedError):
            unseal_bytes(bad, KEY)


def test_armored_files() -> None:
    """Armor is not authenticated by itself, so white space around it may change; what is in it may not."""
    armored = pyrage.encrypt(DATA[:100], [KEY.identity().to_public()], armored=True)
    for at in range(len(armored)):
        for bit in range(8):
            written = io.BytesIO()
            try:
                unseal_stream(io.BytesIO(flipped(armored, at, 1 << bit)), written, KEY)
            except TamperedError:
                assert not written.getvalue()
            else:
                assert written.getvalue() == DATA[:100]
                assert armored[at : at + 1].isspace(), at
    lines = armored.splitlines(keepends=True)
    for kept in (lines[:-1], lines[1:], lines[:2] + lines[3:], lines[:2] + lines[1:], lines[:-2] + lines[-1:]):
        refused(b"".join(kept), DATA[:100])
    refused(armored + armored, DATA[:100])
    refused(armored + b"x", DATA[:100])


@pytest.mark.parametrize("armored", [False, True])
@pytest.mark.parametrize(
    "stanza",
    [b"-> X y\nAAAA\n", b"-> X25519 " + b"A" * 43 + b"\n" + b"A" * 43 + b"\n", b"-> " + b"y" * 60, b"A" * 64 + b"\n"],
)
def test_headers_that_would_take_hours(stanza: bytes, armored: bool) -> None:
    """pyrage takes time in the square of a header's size; 16,000 short stanzas take it two minutes."""
    sealed = b"age-encryption.org/v1\n-> X y\n" * (stanza[0] == 65) or b"age-encryption.org/v1\n"
    sealed += stanza * (2_000_000 // len(stanza))
    if armored:
        lines = (b64encode(sealed[at : at + 48]) for at in range(0, len(sealed), 48))
        sealed = b"-----BEGIN AGE ENCRYPTED FILE-----\n" + b"\n".join(lines) + b"\n-----END AGE ENCRYPTED FILE-----\n"
    begin = time.process_time()
    with pytest.raises(TamperedError, match="header is larger"):
        unseal_stream(io.BytesIO(sealed), io.BytesIO(), KEY)
    assert time.process_time() - begin < 2


def test_as_many_recipients_as_there_may_be() -> None:
    many = [DataKey.generate().recipient for _ in range(MAX_RECIPIENTS - 1)]
    for key, order in ((KEY, [KEY.recipient, *many]), (OTHER, [*many, OTHER.recipient])):
        sealed = seal_bytes(b"rows", order)
        assert unseal_bytes(sealed, key) == b"rows"
        parsed = [pyrage.x25519.Recipient.from_str(one) for one in order]
        assert unseal_bytes(pyrage.encrypt(b"rows", parsed, armored=True), key) == b"rows"
    with pytest.raises(UserError, match="at most"):
        seal_bytes(b"rows", [KEY.recipient, OTHER.recipient, *many])


@settings(max_examples=150, deadline=None)
@given(
    at=st.integers(0, len(SEALED)),
    drop=st.one_of(st.integers(0, 40), st.integers(0, 2 * SEALED_CHUNK)),
    insert=st.one_of(st.binary(max_size=40), st.tuples(st.integers(0, len(SEALED)), st.integers(0, 5000))),
)
def test_random_damage(at: int, drop: int, insert: bytes | tuple[int, int]) -> None:
    """Some bytes removed, and others put in their place, random or copied from elsewhere in the file."""
    piece = insert if isinstance(insert, bytes) else SEALED[insert[0] : insert[0] + insert[1]]
    damaged = SEALED[:at] + piece + SEALED[at + drop :]
    assume(damaged != SEALED)
    refused(damaged)
    with pytest.raises(TamperedError):
        unseal_bytes(damaged, OTHER)
