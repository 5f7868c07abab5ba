from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path

import pyrage
import pytest

from wgpu_lora.errors import UserError
from wgpu_lora.protect.sealed import sealed_files as sealed_files
from wgpu_lora.protect.sealed.age_streams import (
    TamperedError,
    read_recipients,
    seal_bytes,
    seal_stream,
    unseal_bytes,
    unseal_stream,
)
from wgpu_lora.protect.sealed.keys import DataKey
from wgpu_lora.protect.sealed.sealed_files import SealRecord, record_path, seal_path, sealed_digest, unseal_path

KEY, OTHER = DataKey.generate(), DataKey.generate()
CHUNK = 64 << 10


@pytest.mark.parametrize("size", [0, 1, 100, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_bytes_come_back_for_every_recipient(size: int) -> None:
    data = os.urandom(size)
    sealed = seal_bytes(memoryview(data), [KEY.recipient, OTHER.recipient, KEY.recipient])
    assert sealed.count(b"-> X25519") == 2
    for key in (KEY, OTHER):
        opened = unseal_bytes(bytearray(sealed), key)
        assert isinstance(opened, bytearray)
        assert opened == data
    assert data[:16] not in sealed or size < 16


def test_files_are_those_of_age() -> None:
    data = os.urandom(CHUNK + 5)
    assert pyrage.decrypt(seal_bytes(data, [KEY.recipient]), [KEY.identity()]) == data
    for armored in (False, True):
        assert unseal_bytes(pyrage.encrypt(data, [KEY.identity().to_public()], armored), KEY) == data


@pytest.mark.skipif(shutil.which("age") is None, reason="needs the age program")
def test_the_age_program_opens_and_makes_them(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(KEY.file_text())
    (tmp_path / "sealed").write_bytes(seal_bytes(b"rows", [KEY.recipient]))
    opened = subprocess.run(["age", "-d", "-i", tmp_path / "key", tmp_path / "sealed"], capture_output=True, check=True)
    assert opened.stdout == b"rows"
    made = subprocess.run(["age", "-r", KEY.recipient], input=b"rows", capture_output=True, check=True)
    assert unseal_bytes(made.stdout, KEY) == b"rows"


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

    sealed = seal_bytes(b"x" * 100, [KEY.recipient])
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt(), UserError("mine"), MemoryError()):
        for call in (
            lambda e: unseal_stream(io.BytesIO(sealed), Failing(e), KEY),
            lambda e: unseal_stream(Failing(e), io.BytesIO(), KEY),
            lambda e: seal_stream(io.BytesIO(b"x"), Failing(e), [KEY.recipient]),
            lambda e: seal_stream(Failing(e), io.BytesIO(), [KEY.recipient]),
        ):
            with pytest.raises(type(error)) as caught:
                call(error)
            assert caught.value is error


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers that send signals")
@pytest.mark.parametrize("opening", [False, True])
def test_an_interrupt_at_any_time_is_raised_or_comes_after_the_end(opening: bool) -> None:
    data = os.urandom(3 * CHUNK)
    sealed = seal_bytes(data, [KEY.recipient])

    def run(writer: io.BytesIO) -> None:
        if opening:
            unseal_stream(io.BytesIO(sealed), writer, KEY)
        else:
            seal_stream(io.BytesIO(data), writer, [KEY.recipient])

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
            assert (writer.getvalue() if opening else unseal_bytes(writer.getvalue(), KEY)) == data
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted


@pytest.mark.parametrize("bad", [[], ["age1"], [""], ["ssh-ed25519 AAAA"], [KEY.recipient[:-1]], [KEY.recipient, "x"]])
def test_recipients_that_are_none(bad: list[str]) -> None:
    with pytest.raises(UserError, match=r"recipient"):
        seal_bytes(b"x", bad)


def test_a_private_key_as_recipient_is_not_repeated() -> None:
    with pytest.raises(UserError, match="private key") as caught:
        seal_bytes(b"x", [KEY.text().decode()])
    assert KEY.text().decode()[20:30] not in str(caught.value)


def test_recipients_files(tmp_path: Path) -> None:
    path = tmp_path / "recipients"
    path.write_text(f"# two\n{KEY.recipient}\n\n  {OTHER.recipient}  \n")
    assert read_recipients(path) == [KEY.recipient, OTHER.recipient]
    for bad in ("", "# none\n", "age1\n"):
        path.write_text(bad)
        with pytest.raises(UserError):
            read_recipients(path)


def test_what_had_been_opened_before_an_error_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    from wgpu_lora.protect.sealed import age_streams as sealing

    buffers = []

    class Kept(sealing._BufferWriter):
        def __init__(self, buffer: bytearray) -> None:
            super().__init__(buffer)
            buffers.append(buffer)

    monkeypatch.setattr(sealing, "_BufferWriter", Kept)
    sealed = seal_bytes(b"secret" * CHUNK, [KEY.recipient])
    for size in (len(sealed) - 1, CHUNK * 2):
        with pytest.raises(TamperedError):
            unseal_bytes(sealed[:size], KEY)
        assert not any(buffers[-1])
    unseal_bytes(seal_bytes(b"little", [KEY.recipient]), KEY)  # its buffer is larger by the header, so this is a copy
    assert not any(buffers[-1])


def test_sealed_files_and_their_records(tmp_path: Path) -> None:
    source, sealed, opened = tmp_path / "rows.jsonl", tmp_path / "rows.jsonl.age", tmp_path / "opened.jsonl"
    source.write_text('{"a": 1}\n\n  \n{"a": 2}\r\n{"a": 3}')
    record = seal_path(source, sealed, [KEY.recipient, KEY.recipient])
    assert record.rows == 3
    assert record.recipients == (KEY.recipient,)
    assert record.sha256 == sealed_digest(sealed) == hashlib.sha256(sealed.read_bytes()).hexdigest()
    assert SealRecord.read(record_path(sealed)) == record
    unseal_path(sealed, opened, KEY)
    assert opened.read_bytes() == source.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "opened.jsonl", "rows.jsonl", "rows.jsonl.age", "rows.jsonl.age.json",
    ]  # fmt: skip


def test_rows_are_counted_across_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n" * 5 + "\n" + " {} \n")
    for piece in (1, 2, 3, 7):
        monkeypatch.setattr(sealed_files.archive, "PIECE", piece)
        assert seal_path(tmp_path / "rows.jsonl", tmp_path / f"{piece}.age", [KEY.recipient]).rows == 6


def test_sealed_directories(tmp_path: Path) -> None:
    (tmp_path / "adapter" / "sub").mkdir(parents=True)
    (tmp_path / "adapter" / "sub" / "a.bin").write_bytes(os.urandom(200_000))
    record = seal_path(tmp_path / "adapter", tmp_path / "adapter.tar.age", [KEY.recipient])
    assert record.rows is None
    unseal_path(tmp_path / "adapter.tar.age", tmp_path / "again", KEY)
    assert (tmp_path / "again" / "sub" / "a.bin").read_bytes() == (tmp_path / "adapter" / "sub" / "a.bin").read_bytes()
    unseal_path(tmp_path / "adapter.tar.age", tmp_path / "again.tar", KEY)
    shutil.unpack_archive(tmp_path / "again.tar", tmp_path / "third")
    assert (tmp_path / "third" / "sub" / "a.bin").is_file()


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def test_bad_paths_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("x")
    (tmp_path / "empty").write_text("")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "l").symlink_to(tmp_path / "rows")
    (tmp_path / "none").mkdir()
    os.mkfifo(tmp_path / "fifo")
    before = names(tmp_path)
    to = tmp_path / "out.age"
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
    assert names(tmp_path) == before
    for bad in ("missing", "empty", "rows", "none", "fifo"):
        with pytest.raises(UserError):
            unseal_path(tmp_path / bad, tmp_path / "opened", KEY)
    seal_path(tmp_path / "rows", to, [KEY.recipient])
    with pytest.raises(TamperedError, match="cannot be opened with the key"):
        unseal_path(to, tmp_path / "opened", OTHER)
    with pytest.raises(UserError, match="exists already"):
        unseal_path(to, tmp_path / "empty", KEY)
    to.write_bytes(to.read_bytes()[:-1])
    with pytest.raises(TamperedError):
        unseal_path(to, tmp_path / "opened", KEY)
    assert names(tmp_path) == sorted([*before, "out.age", "out.age.json"])


@pytest.mark.parametrize(
    "change",
    [
        {"sha256": "x"},
        {"sha256": None},
        {"bytes": -1},
        {"bytes": True},
        {"rows": "3"},
        {"recipients": "age1"},
        {"more": 1},
    ],
)
def test_records_that_are_none(tmp_path: Path, change: dict[str, object]) -> None:
    good = {"sha256": "0" * 64, "bytes": 1, "rows": None, "recipients": [KEY.recipient]}
    path = tmp_path / "x.age.json"
    path.write_text(json.dumps(good))
    assert SealRecord.read(path).rows is None
    path.write_text(json.dumps(good | change))
    with pytest.raises(UserError, match="not the record"):
        SealRecord.read(path)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_what_was_opened_is_for_its_owner_alone(tmp_path: Path) -> None:
    key = DataKey.generate()
    (tmp_path / "rows.jsonl").write_text("{}")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "a.json").write_text("{}")
    for name, suffix, mode in (("rows.jsonl", ".age", 0o600), ("adapter", ".tar.age", 0o700)):
        seal_path(tmp_path / name, tmp_path / f"{name}{suffix}", [key.recipient])
        unseal_path(tmp_path / f"{name}{suffix}", tmp_path / f"opened-{name}", key)
        assert stat.S_IMODE((tmp_path / f"opened-{name}").stat().st_mode) == mode
