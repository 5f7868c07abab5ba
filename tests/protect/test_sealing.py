"""Keys, sealed data and archives: what comes back, and that whatever somebody changed is refused."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import signal
import stat
import tarfile
import time
from base64 import b64encode
from collections.abc import Iterable
from pathlib import Path

import pyrage
import pytest
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from wgpu_lora.errors import UserError
from wgpu_lora.protect.sealed import age_streams, archive
from wgpu_lora.protect.sealed.age_streams import (
    MAX_RECIPIENTS,
    TamperedError,
    parse_recipient,
    parse_recipients,
    read_recipients,
    seal_bytes,
    seal_stream,
    unseal_bytes,
    unseal_stream,
)  # fmt: skip
from wgpu_lora.protect.sealed.keys import DataKey, PublicKey, SessionKeys, SigningKey, write_private
from wgpu_lora.protect.sealed.sealed_files import SealRecord, record_path, seal_path, unseal_path

KEY, OTHER = DataKey.generate(), DataKey.generate()
BOTH = [KEY.recipient, OTHER.recipient]
CHUNK, TAG, NONCE = 64 << 10, 16, 16
SEALED_CHUNK = CHUNK + TAG
DATA = os.urandom(2 * CHUNK + 1000)
SEALED, SMALL = seal_bytes(DATA, BOTH), seal_bytes(DATA[:100], BOTH)

# -- keys --------------------------------------------------------------------------------------------------------------


def test_keys_survive_their_files_show_nothing_and_are_gone_after_wiping(tmp_path: Path) -> None:
    keys = SessionKeys.generate()
    assert keys.data.text().decode() not in repr(keys)
    assert "PRIVATE" not in repr(keys)
    write_private(tmp_path / "data.key", keys.data.file_text())
    write_private(tmp_path / "broker.pem", keys.signing.private_pem())
    (tmp_path / "broker.pem.pub").write_text(keys.signing.public.pem.replace("\n", "\r\n"))
    assert DataKey.read(tmp_path / "data.key").text() == keys.data.text()
    assert DataKey.parse(keys.data.text().lower()).recipient == keys.data.recipient  # Bech32 has one case or the other
    again, public = SigningKey.read(tmp_path / "broker.pem"), PublicKey.read(tmp_path / "broker.pem.pub")
    assert again.public == keys.signing.public == public
    if os.name != "nt":
        assert stat.S_IMODE((tmp_path / "data.key").stat().st_mode) == 0o600
    public.ssl_key().verify_signature(again.signer.sign(b"said"), b"said")
    with pytest.raises(Exception, match=r"[Vv]erif|[Ss]ignature"):
        public.ssl_key().verify_signature(again.signer.sign(b"said"), b"not said")
    with keys:
        pass
    keys.wipe()
    for use in (keys.data.identity, keys.data.text, keys.data.file_text, keys.signing.private_pem):
        with pytest.raises(ValueError, match="wiped"):
            use()


def test_files_that_hold_no_such_key_are_refused_without_showing_it(tmp_path: Path) -> None:
    path, text = tmp_path / "data.key", DataKey.generate().text()
    for content in (
        b"", b"# only\n", b"age1xyz\n", b"AGE-SECRET-KEY-1QQQQ\n", b"\xff\xfe\x00", b"\0" * 100, text + b"\n" + text,
        text[:-1], b"x" * 70_000,
    ):  # fmt: skip
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"data\.key") as caught:
            DataKey.read(path)
        assert text.decode()[20:40] not in str(caught.value)
    pem, pkcs8, nothing = form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()
    for other in (ec.generate_private_key(ec.SECP384R1()), ed25519.Ed25519PrivateKey.generate()):
        path.write_bytes(other.private_bytes(pem, pkcs8, nothing))
        with pytest.raises(UserError, match="not a P-256 key"):
            SigningKey.read(path)
        with pytest.raises(UserError, match="not a P-256 key"):
            PublicKey.parse(other.public_key().public_bytes(pem, form.PublicFormat.SubjectPublicKeyInfo))
    path.write_bytes(SigningKey.generate().key.private_bytes(pem, pkcs8, form.BestAvailableEncryption(b"secret")))
    with pytest.raises(UserError, match="password"):
        SigningKey.read(path)
    for junk in (b"", b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", b"\xff" * 100):
        path.write_bytes(junk)
        with pytest.raises(UserError, match="not a private key"):
            SigningKey.read(path)
        with pytest.raises(UserError, match="not a public key"):
            PublicKey.read(path)
    for bad in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError, match="cannot be read"):
            DataKey.read(bad)


def test_a_key_is_never_written_over_anything(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, words in {
        "there": "exists already",
        "link": "leads nowhere",
        "there/key": "there is not a directory",
    }.items():
        with pytest.raises(UserError, match=words):
            write_private(tmp_path / name, b"key")
    assert (tmp_path / "there").read_text() == "mine"


def test_recipients(tmp_path: Path) -> None:
    for bad in ([], ["age1"], [""], ["ssh-ed25519 AAAA"], [KEY.recipient[:-1]], [KEY.recipient, "x"]):
        with pytest.raises(UserError, match=r"recipient"):
            seal_bytes(b"x", bad)
    with pytest.raises(UserError, match="private key") as caught:
        seal_bytes(b"x", [KEY.text().decode()])
    assert KEY.text().decode()[20:30] not in str(caught.value)
    path = tmp_path / "recipients"
    path.write_text(f"# two\n{KEY.recipient}\n\n  {OTHER.recipient}  \n")
    assert read_recipients(path) == BOTH
    for text in ("", "# none\n", "age1\n"):
        path.write_text(text)
        with pytest.raises(UserError):
            read_recipients(path)
    for point in (  # of low order: 0, 1, and one of order 8
        "age1qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq5cu47z",
        "age1qyqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqj7vrya",
        "age1ur4h5lpmgxu2u9jku0a0r87ydtdqnr0tnsetrlvxvgz3vh6fhqqqzyt4v9",
    ):
        assert str(pyrage.x25519.Recipient.from_str(point)) == point
        with pytest.raises(pyrage.RecipientError):
            parse_recipient(point)
        with pytest.raises(UserError, match="is not an age X25519 recipient"):
            parse_recipients([point])
    many = [DataKey.generate().recipient for _ in range(MAX_RECIPIENTS - 1)]
    for key, order in ((KEY, [KEY.recipient, *many]), (OTHER, [*many, OTHER.recipient])):
        assert unseal_bytes(seal_bytes(b"rows", order), key) == b"rows"
        parsed = [pyrage.x25519.Recipient.from_str(recipient) for recipient in order]
        assert unseal_bytes(pyrage.encrypt(b"rows", parsed, armored=True), key) == b"rows"
    with pytest.raises(UserError, match="at most"):
        seal_bytes(b"rows", [*BOTH, *many])


# -- sealed data -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 100, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_bytes_come_back_for_every_recipient(size: int) -> None:
    data = os.urandom(size)
    sealed = seal_bytes(data, [*BOTH, KEY.recipient])
    assert sealed.count(b"-> X25519") == 2
    for key in (KEY, OTHER):
        opened = unseal_bytes(bytearray(sealed), key)
        assert isinstance(opened, bytearray)
        assert opened == data == pyrage.decrypt(sealed, [key.identity()])
    assert data[:16] not in sealed or size < 16
    for armored in (False, True):
        assert unseal_bytes(pyrage.encrypt(data, [KEY.identity().to_public()], armored), KEY) == data


class Slow(io.BytesIO):
    """A reader that gives one byte at a time, and a writer that takes one."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(1)

    def write(self, data: object, /) -> int:
        return super().write(bytes(data)[:1])  # type: ignore[call-overload]


def test_streams_of_single_bytes_are_like_those_of_one_piece() -> None:
    data = os.urandom(CHUNK + 100)
    sealed, opened = Slow(), Slow()
    seal_stream(Slow(data), sealed, [KEY.recipient])
    assert len(sealed.getvalue()) - len(seal_bytes(data, [KEY.recipient])) < 400  # but for the header's grease
    unseal_stream(Slow(sealed.getvalue()), opened, KEY)
    assert opened.getvalue() == data == bytes(unseal_bytes(sealed.getvalue(), KEY))


def test_failures_of_either_end_are_raised_as_they_are() -> None:
    class Failing(io.BytesIO):
        def __init__(self, error: BaseException) -> None:
            super().__init__()
            self.error = error

        def read(self, size: int | None = -1, /) -> bytes:
            raise self.error

        def write(self, data: object, /) -> int:
            raise self.error

    for error in (OSError(28, "No space left on device"), KeyboardInterrupt(), UserError("mine"), MemoryError()):
        for call in (
            lambda e: unseal_stream(io.BytesIO(SMALL), Failing(e), KEY),
            lambda e: unseal_stream(Failing(e), io.BytesIO(), KEY),
            lambda e: seal_stream(io.BytesIO(b"x"), Failing(e), BOTH),
            lambda e: seal_stream(Failing(e), io.BytesIO(), BOTH),
        ):
            with pytest.raises(type(error)) as caught:
                call(error)
            assert caught.value is error


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers that send signals")
@pytest.mark.parametrize("opening", [False, True])
def test_an_interrupt_at_any_time_is_raised_or_comes_after_the_end(opening: bool) -> None:
    def run(writer: io.BytesIO) -> None:
        if opening:
            unseal_stream(io.BytesIO(SEALED), writer, KEY)
        else:
            seal_stream(io.BytesIO(DATA), writer, BOTH)

    begin = time.perf_counter()
    run(io.BytesIO())
    usual = time.perf_counter() - begin
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    interrupted = 0
    try:
        for number in range(40):
            writer = io.BytesIO()
            try:
                signal.setitimer(signal.ITIMER_REAL, max(1e-5, usual * number / 30))
                run(writer)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
                continue
            assert (writer.getvalue() if opening else unseal_bytes(writer.getvalue(), KEY)) == DATA
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted


def test_what_had_been_opened_before_an_error_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = []

    class Kept(age_streams._BufferWriter):
        def __init__(self, buffer: bytearray) -> None:
            super().__init__(buffer)
            buffers.append(buffer)

    monkeypatch.setattr(age_streams, "_BufferWriter", Kept)
    for size in (len(SEALED) - 1, CHUNK * 2):
        with pytest.raises(TamperedError):
            unseal_bytes(SEALED[:size], KEY)
        assert not any(buffers[-1])
    unseal_bytes(seal_bytes(b"little", [KEY.recipient]), KEY)  # its buffer is larger by the header, so this is a copy
    assert not any(buffers[-1])


# -- damage ------------------------------------------------------------------------------------------------------------

STANZA = re.compile(rb"-> [^\n]*\n(?:[^\n]{64}\n)*[^\n]{0,63}\n")
HEADER = re.compile(
    rb"(?P<version>age-encryption\.org/v1\n)(?P<stanzas>(?:" + STANZA.pattern + rb")+)(?P<mac>--- [^\n]{43}\n)"
)


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
    output = io.BytesIO()
    with pytest.raises(TamperedError):
        unseal_stream(io.BytesIO(sealed), output, key)
    plaintext = output.getvalue()
    assert data.startswith(plaintext)
    assert len(plaintext) % CHUNK == 0
    return len(plaintext)


def flipped(sealed: bytes, at: int, bits: int = 1) -> bytes:
    return sealed[:at] + bytes([sealed[at] ^ bits]) + sealed[at + 1 :]


def test_every_bit_of_a_small_file_and_tags_and_bodies_of_chunks() -> None:
    """The version line, types, shares and bodies of all stanzas (also those of others), the MAC, the nonce."""
    start = header_size(SMALL) + NONCE
    for at in range(len(SMALL)):
        for bit in range(8) if at < start else [at % 8]:
            assert refused(flipped(SMALL, at, 1 << bit), DATA[:100]) == 0
    for at in range(0, start, 3):
        assert refused(flipped(SMALL, at, 2), DATA[:100], OTHER) == 0
    head, chunks = parts(SEALED)
    for number, chunk in enumerate(chunks):
        size = len(chunk)
        for at in (0, 1, size // 2, size - TAG - 1, *range(size - TAG, size)):
            assert refused(flipped(SEALED, len(head) + number * SEALED_CHUNK + at)) == number * CHUNK


def test_stanzas_and_chunks_removed_doubled_exchanged_or_added() -> None:
    match, foreign_match = HEADER.match(SMALL), HEADER.match(seal_bytes(DATA[:100], BOTH))
    assert match
    assert foreign_match
    stanzas, stranger = STANZA.findall(match["stanzas"]), STANZA.findall(foreign_match["stanzas"])[0]
    for changed in (stanzas[1:], [stanzas[0], *stanzas], stanzas[::-1], [*stanzas, stranger], [stranger, *stanzas], []):
        sealed = match["version"] + b"".join(changed) + match["mac"] + SMALL[match.end() :]
        assert refused(sealed, DATA[:100]) == 0
    for version in (b"age-encryption.org/v2\n", b"age-encryption.org/v1\r\n", b"", b"age-encryption.org/v1 \n"):
        assert refused(version + SMALL[match.end("version") :], DATA[:100]) == 0
    head, (a, b, c) = parts(SEALED)
    for order, whole in {
        (b, c): 0, (a, c): 1, (a, b): 2, (c,): 0, (a,): 1, (): 0,
        (a, a, b, c): 1, (a, b, b, c): 2, (a, b, c, c): 2,
        (b, a, c): 0, (a, c, b): 1, (c, b, a): 0, (b, c, a): 0,
    }.items():  # fmt: skip
        assert refused(joined(head, order)) <= whole * CHUNK, len(order)
    for other in (seal_bytes(DATA, BOTH), seal_bytes(DATA, [KEY.recipient])):  # sealed to the same key
        other_head, other_chunks = parts(other)
        for number in range(3):
            mixed = [(a, b, c)[n] if n != number else other_chunks[n] for n in range(3)]
            assert refused(joined(head, mixed)) == number * CHUNK
        assert refused(joined(other_head, (a, b, c))) == 0
        assert refused(joined(head[:-NONCE] + other_head[-NONCE:], (a, b, c))) == 0


@pytest.mark.parametrize("size", [0, 1, CHUNK, 2 * CHUNK, 2 * CHUNK + 1000])
def test_files_cut_off_at_every_boundary_and_beside_it_and_continued(size: int) -> None:
    sealed = seal_bytes(DATA[:size], BOTH)
    head = len(parts(sealed)[0])
    boundaries = {0, 1, header_size(sealed), head, len(sealed)}
    boundaries |= {m.start() + 1 for m in re.finditer(b"\n", sealed[:head])}
    boundaries |= {head + n * SEALED_CHUNK - part for n in range(4) for part in (0, TAG)}
    for at in {boundary + near for boundary in boundaries for near in (-1, 0, 1)} & {*range(len(sealed))}:
        assert refused(sealed[:at], DATA[:size]) <= max(0, at - head) // SEALED_CHUNK * CHUNK
    _, (*_, last) = parts(SEALED)
    for more in (b"\0", b"\n", bytes(TAG), bytes(SEALED_CHUNK), last, SEALED, sealed):
        refused(sealed + more, DATA[:size])
    refused(b"\n" + sealed, DATA[:size])


def test_other_keys_and_files_that_are_not_sealed() -> None:
    with pytest.raises(TamperedError, match="cannot be opened with the key of age1"):
        unseal_bytes(SEALED, DataKey.generate())
    for bad in (b"", b"{}\n" * 100, b"\0" * 1000, b"age-encryption.org/v1\n", KEY.file_text()):
        with pytest.raises(TamperedError):
            unseal_bytes(bad, KEY)


def test_armored_files() -> None:
    """Armor is not authenticated by itself, so white space around it may change; what is in it may not."""
    armored = pyrage.encrypt(DATA[:100], [KEY.identity().to_public()], armored=True)
    for at in range(len(armored)):
        for bit in range(8):
            output = io.BytesIO()
            try:
                unseal_stream(io.BytesIO(flipped(armored, at, 1 << bit)), output, KEY)
            except TamperedError:
                assert not output.getvalue()
            else:
                assert output.getvalue() == DATA[:100]
                assert armored[at : at + 1].isspace(), at
    lines = armored.splitlines(keepends=True)
    for part in (lines[:-1], lines[1:], lines[:2] + lines[3:], lines[:2] + lines[1:], lines[:-2] + lines[-1:]):
        refused(b"".join(part), DATA[:100])
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


@settings(max_examples=100, deadline=None)
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


# -- sealed files ------------------------------------------------------------------------------------------------------


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def test_sealed_files_and_their_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, sealed, opened = tmp_path / "rows.jsonl", tmp_path / "rows.jsonl.age", tmp_path / "opened.jsonl"
    source.write_text('{"a": 1}\n\n  \n{"a": 2}\r\n{"a": 3}')
    record = seal_path(source, sealed, [KEY.recipient, KEY.recipient])
    assert (record.rows, record.recipients) == (3, (KEY.recipient,))
    assert record.sha256 == hashlib.sha256(sealed.read_bytes()).hexdigest()
    assert SealRecord.read(record_path(sealed)) == record
    unseal_path(sealed, opened, KEY)
    assert opened.read_bytes() == source.read_bytes()
    assert names(tmp_path) == ["opened.jsonl", "rows.jsonl", "rows.jsonl.age", "rows.jsonl.age.json"]
    source.write_text("{}\n" * 5 + "\n" + " {} \n")
    for piece in (1, 2, 3, 7):
        monkeypatch.setattr(archive, "PIECE", piece)
        assert seal_path(source, tmp_path / f"{piece}.age", [KEY.recipient]).rows == 6
    good = json.loads(record_path(sealed).read_text())
    for change in (
        {"sha256": "x"}, {"sha256": None}, {"bytes": -1}, {"bytes": True}, {"rows": "3"}, {"recipients": "age1"},
        {"more": 1},
    ):  # fmt: skip
        record_path(sealed).write_text(json.dumps(good | change))
        with pytest.raises(UserError, match="not the record"):
            SealRecord.read(record_path(sealed))


def test_sealed_directories_and_who_can_read_what_was_opened(tmp_path: Path) -> None:
    (tmp_path / "adapter" / "sub").mkdir(parents=True)
    (tmp_path / "adapter" / "sub" / "a.bin").write_bytes(os.urandom(200_000))
    assert seal_path(tmp_path / "adapter", tmp_path / "adapter.tar.age", [KEY.recipient]).rows is None
    unseal_path(tmp_path / "adapter.tar.age", tmp_path / "again", KEY)
    assert (tmp_path / "again" / "sub" / "a.bin").read_bytes() == (tmp_path / "adapter" / "sub" / "a.bin").read_bytes()
    unseal_path(tmp_path / "adapter.tar.age", tmp_path / "again.tar", KEY)
    shutil.unpack_archive(tmp_path / "again.tar", tmp_path / "third")
    assert (tmp_path / "third" / "sub" / "a.bin").is_file()
    if os.name != "nt":
        assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("again", "again.tar")] == [0o700, 0o600]


def test_bad_paths_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("x")
    (tmp_path / "empty").write_text("")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "l").symlink_to(tmp_path / "rows")
    (tmp_path / "none").mkdir()
    os.mkfifo(tmp_path / "fifo")
    before, to = names(tmp_path), tmp_path / "out.age"
    for bad in ("missing", "empty", "links", "none", "fifo", "x" * 300):
        with pytest.raises(UserError):
            seal_path(tmp_path / bad, to, [KEY.recipient])
    for bad_to in (tmp_path / "rows", tmp_path / "no" / "out", tmp_path / "rows" / "out", tmp_path / ("x" * 300)):
        with pytest.raises(UserError):
            seal_path(tmp_path / "rows", bad_to, [KEY.recipient])
    (tmp_path / "out.age.json").write_text("{}")
    with pytest.raises(UserError, match="exists already"):
        seal_path(tmp_path / "rows", to, [KEY.recipient])
    (tmp_path / "out.age.json").unlink()
    for bad in ("missing", "empty", "rows", "none", "fifo"):
        with pytest.raises(UserError):
            unseal_path(tmp_path / bad, tmp_path / "opened", KEY)
    assert names(tmp_path) == before
    seal_path(tmp_path / "rows", to, [KEY.recipient])
    with pytest.raises(TamperedError, match="cannot be opened with the key"):
        unseal_path(to, tmp_path / "opened", OTHER)
    with pytest.raises(UserError, match="exists already"):
        unseal_path(to, tmp_path / "empty", KEY)
    to.write_bytes(to.read_bytes()[:-1])
    with pytest.raises(TamperedError):
        unseal_path(to, tmp_path / "opened", KEY)
    assert names(tmp_path) == sorted([*before, "out.age", "out.age.json"])


# -- archives ----------------------------------------------------------------------------------------------------------

FILES = {"adapter_model.safetensors": bytes(range(256)) * 5, "a/b/deep.json": b"{}", "empty": b"", "ä" * 40: b"x" * 512}


def member(name: str, kind: bytes = tarfile.REGTYPE, content: bytes = b"x", **fields: object) -> bytes:
    """An archive with one member, which may be one that nobody should open."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    head = info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
    return head + content + bytes(-len(content) % 512) + archive.END


def test_archives_are_the_same_for_the_same_files_and_can_be_read_by_tar(tmp_path: Path) -> None:
    data = archive.pack(FILES)
    assert data == archive.pack(dict(reversed(FILES.items())))
    assert archive.unpack(bytearray(data)) == FILES
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert {m.name: tar.extractfile(m).read() for m in tar.getmembers()} == FILES  # type: ignore[union-attr]
    for name, content in FILES.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(content)
    assert b"".join(archive.stream(tmp_path / "in")) == data
    (tmp_path / "in" / "none").mkdir()
    (tmp_path / "out").mkdir()
    archive.extract(memoryview(b"".join(archive.stream(tmp_path / "in"))), tmp_path / "out")
    paths = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {path.relative_to(tmp_path / "out").as_posix(): path.read_bytes() for path in paths} == FILES
    assert (tmp_path / "out" / "none").is_dir()


def test_directories_that_cannot_be_archived(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    for name, make in {
        "link": lambda d: (d / "l").symlink_to(tmp_path / "secret"),
        "broken": lambda d: (d / "l").symlink_to(tmp_path / "missing"),
        "fifo": lambda d: os.mkfifo(d / "f"),
        "nothing": lambda d: None,
        "long": lambda d: (d / ("n" * 200)).write_text("x"),
    }.items():
        (tmp_path / name).mkdir()
        make(tmp_path / name)
        with pytest.raises(UserError, match=r"link or a special|no file|too long"):
            b"".join(archive.stream(tmp_path / name))
    for size in (2000, 10):  # a file that changes while it is read
        (tmp_path / "changing").mkdir(exist_ok=True)
        (tmp_path / "changing" / "a").write_bytes(b"x" * 1000)
        pieces = archive.stream(tmp_path / "changing")
        next(pieces)
        (tmp_path / "changing" / "a").write_bytes(b"x" * size)
        with pytest.raises(UserError, match="has changed"):
            b"".join(pieces)


def test_archives_that_nobody_should_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    for data in (
        member("/etc/passwd"), member("../up"), member("a/../../up"), member("a//b"), member("./a"), member(""),
        member("C:\\x"), member("a:b"), member("a\\b"), member("a", tarfile.SYMTYPE, linkname="/etc/passwd"),
        member("a", tarfile.LNKTYPE, linkname="b"), member("a", tarfile.CHRTYPE), member("a", tarfile.FIFOTYPE),
        member("a", tarfile.GNUTYPE_SPARSE), member("n" * 300), member("a")[: -len(archive.END)] + member("a"),
        member("a")[: -len(archive.END)] + member("a/b"), member("a")[:700], member("a")[: -len(archive.END)],
        member("a" * 90, content=b"x" * 600)[:1024], member("a", size=-1), member("a", size=1 << 62), b"", b"\0" * 512,
        b"x" * 2000, member("a\udcff"),
    ):  # fmt: skip
        with pytest.raises(UserError, match="archive"):
            archive.unpack(data)
        with pytest.raises(UserError, match="archive"):
            archive.extract(memoryview(data), tmp_path / "out")
    assert names(tmp_path / "out") == []
    for name in ("/a", "../a", "a/..", "", "a\0b", "x" * 300, "a/" * 200 + "b"):
        with pytest.raises(UserError):
            archive.pack({name: b""})
    ten = archive.pack({str(i): b"" for i in range(10)})
    monkeypatch.setattr(archive, "MAX_MEMBERS", 9)
    for call in (lambda: archive.unpack(ten), lambda: archive.pack({str(i): b"" for i in range(10)})):
        with pytest.raises(UserError, match="more than 9"):
            call()
