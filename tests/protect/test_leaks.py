"""The search for pieces of secrets finds what is planted, in every encoding and at every place."""

from __future__ import annotations

import base64
import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest
from support.protect.leaks import IDENTITY, Pieces, identity_pieces, secret_of

TEXT = 'The patient "Ada Löwe" was\nadmitted on Tuesday; see row 41.'
IDS = [17, 203, 5, 1024, 99, 7, 180, 42, 31, 2000]
NOISE = np.random.default_rng(0).bytes(1 << 16)


@pytest.fixture
def pieces() -> Pieces:
    result = Pieces()
    result.text("the row", TEXT)
    result.tokens("the ids", IDS)
    return result


def planted(tmp_path: Path, data: bytes, at: int = 12_345) -> list[Path]:
    path = tmp_path / "below" / "file.bin"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(NOISE[:at] + data + NOISE[at:])
    return [tmp_path]


PLANTED: list[bytes] = [
    TEXT.encode()[3:19],
    TEXT.encode()[-16:],
    TEXT.encode("utf-16-le")[11:27],
    TEXT.encode("utf-16-be")[20:36],
    json.dumps(TEXT).encode()[10:26],
    json.dumps(json.dumps(TEXT)).encode()[12:30],
    json.dumps(TEXT, ensure_ascii=False).encode()[20:36],
    repr(TEXT).encode()[20:40],
    *(base64.b64encode(b"x" * skipped + TEXT.encode())[8:24] for skipped in range(3)),
    base64.encodebytes(b"padding..." * 9 + TEXT.encode()),
    base64.urlsafe_b64encode(TEXT.encode("utf-16-le"))[8:24],
    TEXT.encode().hex().encode()[7:23],
    TEXT.encode()[::-1][5:21],
    *(np.array(IDS[2:6], kind).tobytes() for kind in ("<u4", ">u4", "<i4", "<i8", ">i8", "<f4")),
    np.array(IDS[1:9], "<u2").tobytes(),
    np.array(IDS[1:9], ">u2").tobytes(),
    json.dumps(IDS)[5:25].encode(),
    json.dumps(IDS, separators=(",", ":"))[5:25].encode(),
    " ".join(map(str, IDS)).encode()[4:22],
]


def test_a_planted_piece_is_found(tmp_path: Path, pieces: Pieces) -> None:
    for data in PLANTED:
        for at in (0, 1, 12_347):
            (leak, *_) = pieces.leaks(planted(tmp_path, data, at))
            assert leak.path.name == "file.bin"
            assert at <= leak.offset < at + len(data), data


def test_nothing_is_found_where_nothing_is(tmp_path: Path, pieces: Pieces):
    assert pieces.leaks(planted(tmp_path, TEXT.encode()[3:18])) == []  # 15 bytes
    assert pieces.leaks(planted(tmp_path, np.array(IDS[:3], "<u4").tobytes())) == []
    assert Pieces().leaks([tmp_path]) == []


def test_compressed_files_and_names_of_files_are_searched(tmp_path: Path, pieces: Pieces):
    (tmp_path / "rows.gz").write_bytes(gzip.compress(b"some " * 100 + TEXT.encode()))
    assert pieces.leaks([tmp_path / "rows.gz"])
    (tmp_path / "rows.gz").unlink()
    (tmp_path / TEXT[12:40].replace("\n", "_").replace("/", "_")).write_bytes(b"")
    secrets = Pieces()
    secrets.text("a name", TEXT.replace("\n", "_"))
    assert secrets.leaks([tmp_path])


def test_keys_are_found_as_text_and_as_bytes(tmp_path: Path):
    pyrage = pytest.importorskip("pyrage")
    identity = str(pyrage.x25519.Identity.generate())
    secret = secret_of(identity)
    assert len(secret) == 32
    secrets = Pieces()
    identity_pieces(secrets, "the data key", identity)
    for data in (identity.encode(), secret, secret[:16], secret[16:], base64.b64encode(secret), secret.hex().encode()):
        assert secrets.leaks(planted(tmp_path, data))
    assert secrets.leaks(planted(tmp_path, IDENTITY.encode() + os.urandom(40))) == []
    other = str(pyrage.x25519.Identity.generate()).encode()
    assert secrets.leaks(planted(tmp_path, other)) == []
