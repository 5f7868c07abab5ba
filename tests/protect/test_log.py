"""The evidence log and its anchors: what is written, what killed processes leave, and all ways to tamper with lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from wgpu_lora.errors import UserError
from wgpu_lora.protect.evidence import anchors
from wgpu_lora.protect.evidence.run_evidence import KIND, NAME, EvidenceLog, read_log
from wgpu_lora.protect.evidence.signed_log import MAX_LINE_BYTES, DamagedError, SignedLog
from wgpu_lora.protect.sealed.keys import SessionKeys, SigningKey

Lines = list[bytes]
OTHER = b"ab" * 32


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WGPU_LORA_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def write_log(directory: Path, run: str = "run-1") -> EvidenceLog:
    """A log of two sessions."""
    directory.mkdir()
    log = EvidenceLog.start(directory, SessionKeys.generate(), run)
    log.attested(b"evidence one")
    log.released("token one", {"job": "a"})
    log.append("checkpoint", {"step": 2, "loss": 0.5}, [("checkpoints/step-2.tar.age", "c" * 64)])
    log = EvidenceLog.resume(directory, SessionKeys.generate())
    log.attested(b"evidence two")
    log.append("checkpoint", {"step": 4, "loss": float("nan")})
    log.append("interrupted", {"signal": "SIGTERM"})
    return log


def test_lines_name_each_other_and_files_are_kept(tmp_path: Path) -> None:
    log = write_log(tmp_path / "run")
    entries = read_log(tmp_path / "run" / NAME)
    assert entries == log.entries
    assert [entry.sequence for entry in entries] == list(range(6))
    assert [entry.previous for entry in entries[1:]] == [entry.digest for entry in entries[:-1]]
    assert log.head == entries[-1].digest
    assert log.session == 2
    assert entries[2].subjects == (("checkpoints/step-2.tar.age", "c" * 64),)
    assert entries[4].facts == {"step": 4, "loss": None}
    assert entries[0].keyid != entries[3].keyid == entries[5].keyid
    assert (tmp_path / "run" / "evidence-2.json").read_bytes() == b"evidence two"
    assert (tmp_path / "run" / "release-1.jwt").read_text() == "token one"


def changed(number: int, old: bytes, new: bytes) -> Callable[[Lines], Lines]:
    def change(lines: Lines) -> Lines:
        assert old in lines[number]
        return [*lines[:number], lines[number].replace(old, new, 1), *lines[number + 1 :]]

    return change


def flipped(number: int, at: float) -> Callable[[Lines], Lines]:
    def flip(lines: Lines) -> Lines:
        line = bytearray(lines[number])
        line[int(at * (len(line) - 1))] ^= 1
        return [*lines[:number], bytes(line), *lines[number + 1 :]]

    return flip


TAMPERING: dict[str, Callable[[Lines], Lines]] = {
    **{f"line {n} removed": lambda lines, n=n: lines[:n] + lines[n + 1 :] for n in range(5)},
    **{f"line {n} moved": lambda lines, n=n: [*lines[:n], lines[n + 1], lines[n], *lines[n + 2 :]] for n in range(5)},
    **{f"line {n} doubled": lambda lines, n=n: lines[: n + 1] + lines[n:] for n in range(6)},
    **{f"line {n} flipped at {at}": flipped(n, at) for n in range(6) for at in (0, 0.1, 0.35, 0.6, 0.9, 0.99, 1)},
    "a space in the last line": changed(5, b'{"payload"', b'{ "payload"'),
    "a line of nothing": lambda lines: [*lines[:3], b"", *lines[3:]],
    "a line of JSON": lambda lines: [*lines, b"{}"],
    "a line too long": lambda lines: [*lines, b"x" * (MAX_LINE_BYTES + 1)],
    "no signature": lambda lines: [*lines[:5], json.dumps({**json.loads(lines[5]), "signatures": []}).encode()],
}


def test_tampering_is_found(tmp_path: Path) -> None:
    write_log(tmp_path / "run")
    path = tmp_path / "run" / NAME
    lines = path.read_bytes().splitlines()
    for change in TAMPERING.values():
        path.write_bytes(b"\n".join(change(lines)) + b"\n")
        with pytest.raises(DamagedError, match=r"evidence.jsonl, line \d: .* not what was written"):
            read_log(path)
        with pytest.raises(DamagedError):
            EvidenceLog.resume(tmp_path / "run", SessionKeys.generate())
    for count in range(6):  # an earlier state, where it was written
        path.write_bytes(b"".join(line + b"\n" for line in lines[:count]))
        with pytest.raises(UserError, match=r"had come to line 6|no complete line"):
            EvidenceLog.resume(tmp_path / "run", SessionKeys.generate())


def test_lines_of_another_log_or_key_do_not_fit(tmp_path: Path) -> None:
    write_log(tmp_path / "a")
    write_log(tmp_path / "b", "run-2")
    path, other = (tmp_path / name / NAME for name in "ab")
    lines, strange = path.read_bytes().splitlines(True), other.read_bytes().splitlines(True)
    for n in range(6):
        path.write_bytes(b"".join([*lines[:n], strange[n], *lines[n + 1 :]]))
        with pytest.raises(DamagedError):
            read_log(path)
    path.write_bytes(b"".join(lines))
    keys = SessionKeys.generate()
    log = EvidenceLog.resume(tmp_path / "a", keys)
    SignedLog.append(log, "checkpoint", {"step": 9})  # its key was not attested
    with pytest.raises(DamagedError, match=r"line 7: .*signed by"):
        read_log(path)


def test_only_an_incomplete_last_line_is_cut(tmp_path: Path) -> None:
    write_log(tmp_path / "run")
    path = tmp_path / "run" / NAME
    whole = path.read_bytes()
    for torn in (b"{", b"\xff", whole.splitlines()[2]):
        path.write_bytes(whole + torn)
        assert len(read_log(path)) == 6
        log = EvidenceLog.resume(tmp_path / "run", SessionKeys.generate())
        assert log.cut == len(torn)
        assert path.read_bytes() == whole
    log.attested(b"three")
    assert len(read_log(path)) == 7


def test_a_copy_that_went_on_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Path) -> None:
    write_log(tmp_path / "run")
    path = tmp_path / "run" / NAME
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(True)[:3]))
    monkeypatch.setenv("WGPU_LORA_DATA_DIR", str(tmp_path / "elsewhere"))
    log = EvidenceLog.resume(tmp_path / "run", SessionKeys.generate())  # without an anchor
    for _ in range(2):
        log.attested(b"another two")
        log.append("checkpoint", {"step": 4})
    monkeypatch.setenv("WGPU_LORA_DATA_DIR", str(data))
    with pytest.raises(UserError, match="has another line 6 than this machine wrote"):
        EvidenceLog.resume(tmp_path / "run", SessionKeys.generate())
    with pytest.raises(UserError, match="had come to line"):
        anchors.remember("run-1", 4, "0" * 64)
    with pytest.raises(UserError, match="has another line"):
        anchors.remember("run-1", 5, "0" * 64)


def test_another_writer_and_wrong_stages_are_refused(tmp_path: Path) -> None:
    log = write_log(tmp_path / "run")
    path = tmp_path / "run" / NAME
    with pytest.raises(UserError, match="exists already"):
        SignedLog(path, "x", KIND, SigningKey.generate()).create()
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / NAME).write_bytes(b'{"payload')  # before its first line was complete
    EvidenceLog.start(tmp_path / "killed", SessionKeys.generate(), "run-3").attested(b"one")
    assert len(read_log(tmp_path / "killed" / NAME)) == 1
    with pytest.raises(UserError, match="recorded on this machine before"):
        EvidenceLog.start(tmp_path / "run", SessionKeys.generate(), "run-1")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="cannot be the next line"):
        log.append("hacked", {})
    with pytest.raises(UserError, match="fewer facts"):
        log.append("failed", {"error": "x" * MAX_LINE_BYTES})
    assert path.read_bytes() == before
    path.write_bytes(before + b"x")
    with pytest.raises(DamagedError, match="another process"):
        log.append("failed", {})
    path.unlink()
    with pytest.raises(UserError, match="cannot be written"):
        log.append("failed", {})
    assert not path.exists()


def test_a_damaged_anchor_is_said(tmp_path: Path, data: Path) -> None:
    write_log(tmp_path / "run")
    (anchor,) = (data / "anchors").glob("*.json")
    for content in (b"", b"{", b"[]", b'{"run": "run-1"}', b'{"run":"x","sequence":1,"head":"a"}'):
        anchor.write_bytes(content)
        with pytest.raises(UserError, match=str(anchor)):
            EvidenceLog.resume(tmp_path / "run", SessionKeys.generate())
    anchor.unlink()
    assert not anchors.check("run-1", [])
    EvidenceLog.resume(tmp_path / "run", SessionKeys.generate())
