from __future__ import annotations

import io
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wgpu_lora.errors import UserError
from wgpu_lora.protect.sealed import archive

FILES = {"adapter_model.safetensors": bytes(range(256)) * 5, "a/b/deep.json": b"{}", "empty": b"", "ä" * 40: b"x" * 512}


def made(name: str, kind: bytes = tarfile.REGTYPE, content: bytes = b"x", **fields: object) -> bytes:
    """An archive with one member, which may be one that nobody should open."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return (
        info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape") + content + bytes(-len(content) % 512) + archive.END
    )


def test_archives_are_the_same_for_the_same_files_and_can_be_read_by_tar() -> None:
    data = archive.pack(FILES)
    assert data == archive.pack(dict(reversed(FILES.items())))
    assert archive.unpack(bytearray(data)) == FILES
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert {m.name: tar.extractfile(m).read() for m in tar.getmembers()} == FILES  # type: ignore[union-attr]


def test_a_directory_and_its_archive(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(content)
    assert b"".join(archive.stream(tmp_path / "in")) == archive.pack(FILES)
    (tmp_path / "in" / "none").mkdir()
    (tmp_path / "out").mkdir()
    archive.extract(memoryview(b"".join(archive.stream(tmp_path / "in"))), tmp_path / "out")
    assert {
        p.relative_to(tmp_path / "out").as_posix(): p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()
    } == FILES
    assert (tmp_path / "out" / "none").is_dir()


@pytest.mark.parametrize("kind", ["link", "broken", "fifo", "nothing", "long"])
def test_directories_that_cannot_be_archived(tmp_path: Path, kind: str) -> None:
    import os

    (tmp_path / "d").mkdir()
    if kind in ("link", "broken"):
        (tmp_path / "secret").write_text("x")
        (tmp_path / "d" / "l").symlink_to(tmp_path / ("secret" if kind == "link" else "missing"))
    elif kind == "fifo":
        os.mkfifo(tmp_path / "d" / "f")
    elif kind == "long":
        (tmp_path / "d" / ("n" * 200)).write_text("x")
    with pytest.raises(UserError, match=r"link or a special|no file|too long"):
        b"".join(archive.stream(tmp_path / "d"))


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    for more in (True, False):
        (tmp_path / "a").write_bytes(b"x" * 1000)
        parts = archive.stream(tmp_path)
        next(parts)
        (tmp_path / "a").write_bytes(b"x" * (2000 if more else 10))
        with pytest.raises(UserError, match="has changed"):
            b"".join(parts)


@pytest.mark.parametrize(
    "data",
    [
        made("/etc/passwd"), made("../up"), made("a/../../up"), made("a//b"), made("./a"), made(""), made("C:\\x"),
        made("a:b"),
        made("a\\b"), made("a", tarfile.SYMTYPE, linkname="/etc/passwd"), made("a", tarfile.LNKTYPE, linkname="b"),
        made("a", tarfile.CHRTYPE), made("a", tarfile.FIFOTYPE), made("a", tarfile.GNUTYPE_SPARSE), made("n" * 300),
        made("a")[: -len(archive.END)] + made("a"), made("a")[: -len(archive.END)] + made("a/b"), made("a")[:700],
        made("a")[: -len(archive.END)], made("a" * 90, content=b"x" * 600)[:1024], made("a", size=-1),
        made("a", size=1 << 62),
        b"", b"\0" * 512, b"x" * 2000, made("a\udcff"),
    ],
)  # fmt: skip
def test_archives_that_nobody_should_open(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="archive"):
        archive.unpack(data)
    with pytest.raises(UserError, match="archive"):
        archive.extract(memoryview(data), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["/a", "../a", "a/..", "", "a\0b", "x" * 300, "a/" * 200 + "b"])
def test_names_that_are_not_packed(name: str) -> None:
    with pytest.raises(UserError):
        archive.pack({name: b""})


def test_an_archive_of_too_many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    data = archive.pack({str(i): b"" for i in range(10)})
    monkeypatch.setattr(archive, "MAX_MEMBERS", 9)
    with pytest.raises(UserError, match="more than 9"):
        archive.unpack(data)
    with pytest.raises(UserError, match="more than 9"):
        archive.pack({str(i): b"" for i in range(10)})


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 6000), piece=st.binary(min_size=1, max_size=12))
def test_a_damaged_archive_is_read_or_refused(at: int, piece: bytes) -> None:
    data = bytearray(archive.pack(FILES))
    at %= len(data)
    data[at : at + len(piece)] = piece[: len(data) - at]
    with suppress(UserError):
        archive.unpack(data)
