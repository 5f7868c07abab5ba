"""protect keygen, seal and open, as commands: what they write and print, and bad input of every kind."""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import tarfile
from importlib import import_module
from pathlib import Path

import pytest
from support.protect.brokers import Owner, Trainer

from wgpu_lora.cli.app import main
from wgpu_lora.processes.signals import discard_when_closed
from wgpu_lora.protect.sealed.age_streams import seal_bytes
from wgpu_lora.protect.sealed.keys import DataKey, PublicKey, SigningKey, write_private
from wgpu_lora.protect.sealed.sealed_files import seal_path, unseal_path

ROWS = '{"prompt": "a", "completion": "b"}\n' * 3
KEY = DataKey.generate()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(
        "wgpu_lora.protect.memory_protection.harden", lambda: None
    )  # of this process, which runs other tests
    monkeypatch.chdir(tmp_path)
    write_private("data.key", KEY.file_text())
    Path("rows.jsonl").write_text(ROWS)
    return tmp_path


class Standard(io.TextIOWrapper):
    def __init__(self, data: bytes = b"") -> None:
        super().__init__(io.BytesIO(data))

    def content(self) -> bytes:
        self.flush()
        return self.buffer.getvalue()  # type: ignore[attr-defined,no-any-return]


def protect(*arguments: str) -> int:
    return main(["protect", *arguments])


def names() -> set[str]:
    return {path.as_posix() for path in Path().rglob("*")}


def test_keygen_writes_keys_that_only_the_owner_can_read(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert protect("keygen", "new.key") == 0
    printed = capsys.readouterr().out
    key = DataKey.read("new.key")
    assert f"recipient {key.recipient}\n" in printed
    assert "SECRET" not in printed
    assert protect("keygen", "broker.pem", "--signing", "--json") == 0
    printed = capsys.readouterr().out
    assert json.loads(printed)["keyid"] == SigningKey.read("broker.pem").public.keyid
    assert "PRIVATE" not in printed
    assert PublicKey.read("broker.pem.pub") == SigningKey.read("broker.pem").public
    if os.name != "nt":
        assert {stat.S_IMODE(Path(name).stat().st_mode) for name in ("new.key", "broker.pem")} == {0o600}


def test_keygen_leaves_what_is_there(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.pem.pub").write_text("mine")
    before = names()
    for arguments in ("data.key", "data.key/new.key", ".", "-", "x.pem --signing", "n" * 300):
        assert protect("keygen", *arguments.split()) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1
        assert "Errno" not in error
        assert names() == before
    assert DataKey.read("data.key").text() == KEY.text()
    assert protect("keygen", "owner/keys/data.key") == 0
    if os.name != "nt":
        assert stat.S_IMODE(Path("owner/keys").stat().st_mode) == 0o700


def test_a_file_sealed_and_opened(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = DataKey.generate()
    Path("team").write_text(f"# team\n{other.recipient}\n")
    assert protect("seal", "rows.jsonl", "--to", KEY.recipient, "--to", "@team", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    sealed = Path("rows.jsonl.age").read_bytes()
    assert printed["sha256"] == hashlib.sha256(sealed).hexdigest()
    assert printed["recipients"] == [KEY.recipient, other.recipient]
    assert (printed["rows"], printed["bytes"]) == (3, len(sealed))
    assert protect("open", "rows.jsonl.age", "--key", "data.key", "-o", "again.jsonl") == 0
    assert Path("again.jsonl").read_text() == ROWS
    assert names() == {"data.key", "rows.jsonl", "team", "rows.jsonl.age", "rows.jsonl.age.json", "again.jsonl"}


def test_a_reader_of_standard_output_that_goes_away_is_no_success(here: Path) -> None:
    seal_path("rows.jsonl", "rows.jsonl.age", [KEY.recipient])
    for command in (
        lambda out: seal_path("rows.jsonl", "-", [KEY.recipient], None, out),
        lambda out: unseal_path("rows.jsonl.age", "-", KEY, None, out),
    ):
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "w") as file, pytest.raises(BrokenPipeError):
            command(discard_when_closed(file))


def test_standard_input_and_output(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = Standard()
    monkeypatch.setattr("sys.stdin", Standard(ROWS.encode()))
    monkeypatch.setattr("sys.stdout", out)
    assert protect("seal", "-", "--to", KEY.recipient, "-o", "-") == 0
    sealed = out.content()
    for arguments in (["-", "-o", "-"], ["-", "-o", "again"]):
        out = Standard()
        monkeypatch.setattr("sys.stdin", Standard(sealed))
        monkeypatch.setattr("sys.stdout", out)
        assert protect("open", *arguments, "--key", "data.key") == 0
        assert ROWS.encode() in (out.content(), Path("again").read_bytes() if "again" in arguments else b"")
    monkeypatch.setattr("sys.stdin", Standard(ROWS.encode()))
    assert protect("seal", "-", "--to", KEY.recipient, "-o", "in.jsonl.age") == 0
    assert json.loads(Path("in.jsonl.age.json").read_text())["rows"] == 3


def refuses(command: str, arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """A command ends with one sentence, and leaves nothing."""
    before = names()
    assert protect(command, *arguments.split()) == 2, arguments
    printed = capsys.readouterr()
    assert len(printed.err.splitlines()) == 1, arguments
    assert names() == before, arguments
    return printed.out + printed.err


def test_what_cannot_be_sealed(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Standard())
    Path("empty").touch()
    Path("links").mkdir()
    Path("links/out").symlink_to("/etc")
    for arguments in (
        "rows.jsonl", "rows.jsonl --to me", "rows.jsonl --to @missing", "rows.jsonl --to @rows.jsonl",
        "missing --to KEY", "empty --to KEY", "links --to KEY", "rows.jsonl --to KEY -o data.key",
        "rows.jsonl --to KEY -o no/where", "- --to KEY", "- --to KEY -o x", ". --to KEY", ".. --to KEY",
        "links --to KEY -o links/x", "rows.jsonl --to SECRET", "rows.jsonl --to KEY --policy p.toml",
        "data.key --to KEY --offline e.json", "data.key --offline e.json --policy p.toml",
        "rows.jsonl --to KEY --passphrase", "rows.jsonl rows.jsonl --to KEY",
    ):  # fmt: skip
        words = arguments.replace("KEY", KEY.recipient).replace("SECRET", KEY.text().decode())
        assert "AGE-SECRET" not in refuses("seal", words, capsys)


def test_what_cannot_be_opened(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Standard())
    sealed = seal_bytes(ROWS.encode(), [KEY.recipient])
    Path("sealed").write_bytes(sealed)
    Path("sealed.tar.age").write_bytes(sealed)  # no archive
    Path("cut").write_bytes(sealed[:-1])
    Path("empty").touch()
    write_private("other.key", DataKey.generate().file_text())
    write_private("broker.pem", SigningKey.generate().private_pem())
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        link = tarfile.TarInfo("out")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        tar.addfile(link)
    Path("links.tar.age").write_bytes(seal_bytes(buffer.getvalue(), [KEY.recipient]))
    for arguments in (
        "sealed", "sealed --key data.key", "sealed -o x", "sealed --key missing -o x", "sealed --key rows.jsonl -o x",
        "sealed --key other.key -o x", "sealed --key broker.pem -o x", "missing --key data.key -o x",
        "empty --key data.key -o x", "rows.jsonl --key data.key -o x", "data.key --key data.key -o x",
        "cut --key data.key -o x", "cut --key data.key -o -", "sealed --key data.key -o rows.jsonl",
        "sealed --key data.key -o no/where", "links.tar.age --key data.key -o x",
        "sealed.tar.age --key data.key -o x", ". --key data.key -o x", "- --key data.key -o x",
    ):  # fmt: skip
        assert "prompt" not in refuses("open", arguments, capsys)
    assert Path("rows.jsonl").read_text() == ROWS


def test_sealed_data_are_not_written_to_a_terminal(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(import_module("wgpu_lora.cli.protect.keys_and_sealing"), "is_terminal", lambda stream: True)
    assert protect("seal", "rows.jsonl", "--to", KEY.recipient, "-o", "-") == 2
    assert "terminal" in capsys.readouterr().err


def test_closed_streams(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert protect("seal", "-", "--to", KEY.recipient, "-o", "x") == 2
    assert protect("open", "-", "--key", "data.key", "-o", "x") == 2
    assert capsys.readouterr().err.count("Standard input is closed") == 2


def test_a_missing_library_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("wgpu_lora.protect.find_spec", lambda name: None if name == "pyrage" else name)
    for words in (["keygen", "k"], ["seal", "rows.jsonl"], ["open", "x", "--key", "data.key", "-o", "y"]):
        assert protect(*words) == 2
        assert "pyrage" in capsys.readouterr().err


def test_a_data_key_sealed_to_an_attested_machine(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("owner").mkdir()
    owner = Owner(here / "owner")
    trainer = Trainer(owner)
    files = ["--policy", str(owner.policy), "--signing-key", str(owner.signing_file)]
    assert protect("nonce", *files) == 0
    nonce = capsys.readouterr().out.strip()
    evidence = trainer.evidence(nonce)
    Path("evidence.json").write_bytes(evidence)
    Path("taken").touch()
    release = ["seal", str(owner.data_file), "--offline", "evidence.json", *files, "-o"]
    assert protect(*release, "taken") == 2  # before the nonce is used up
    assert protect(*release, "release.jwt") == 0
    token = Path("release.jwt").read_text()
    assert trainer.opened(token, evidence, nonce).key.text() == owner.data.text()
    capsys.readouterr()
    before = names()
    assert protect(*release, "second.jwt") == 2
    assert "evidence.nonce" in capsys.readouterr().err
    assert names() == before
