"""OpenSSF model signing: what is signed in memory is accepted by the library's own command, and nothing else is."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from wgpu_lora.errors import UserError
from wgpu_lora.protect.evidence.model_signature import NAME, sign_model, verify_model
from wgpu_lora.protect.sealed.keys import SigningKey

FILES = {"adapter_model.safetensors": b"weights", "adapter_config.json": b"{}", "deep/er/card.md": b""}
KEY = SigningKey.generate()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    for name, data in {**FILES, NAME: sign_model(FILES, KEY)}.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory


def accepted_by_command(model: Path, key: SigningKey = KEY) -> bool:
    public = model.parent / "key.pub"
    public.write_text(key.public.pem)
    command = [sys.executable, "-m", "model_signing", "verify", "key", "--public_key", str(public)]
    process = subprocess.run([*command, "--signature", str(model / NAME), str(model)], capture_output=True, timeout=120)
    return process.returncode == 0


def test_the_signature_is_accepted(model: Path) -> None:
    verify_model(model, KEY.public)
    assert accepted_by_command(model)
    assert not accepted_by_command(model, SigningKey.generate())


def link(model: Path) -> None:
    (model / "adapter_config.json").rename(model.parent / "elsewhere")
    (model / "adapter_config.json").symlink_to(model.parent / "elsewhere")


def resign(model: Path) -> None:
    (model / NAME).write_bytes(sign_model(FILES, SigningKey.generate()))


CHANGES: dict[str, Callable[[Path], object]] = {
    "changed": lambda model: (model / "adapter_model.safetensors").write_bytes(b"Weights"),
    "emptied": lambda model: (model / "adapter_config.json").write_bytes(b""),
    "added": lambda model: (model / "more.bin").write_bytes(b""),
    "added of git": lambda model: (model / ".gitignore").write_bytes(b""),
    "added deep": lambda model: (model / "deep" / "more").write_bytes(b""),
    "removed": lambda model: (model / "deep" / "er" / "card.md").unlink(),
    "renamed": lambda model: (model / "adapter_config.json").rename(model / "config.json"),
    "a link": link,
    "another key": resign,
    "no signature": lambda model: (model / NAME).unlink(),
    "no bundle": lambda model: (model / NAME).write_bytes(b"[]"),
    "no JSON": lambda model: (model / NAME).write_bytes(b"\xff"),
    "another signature": lambda model: (model / NAME).write_bytes(sign_model({**FILES, "x": b""}, KEY)),
}


def test_every_change_is_found(model: Path) -> None:
    copy = shutil.copytree(model, model.parent / "kept")
    for name, change in CHANGES.items():
        change(model)
        with pytest.raises(UserError, match=r"model.sig does not verify the files") as raised:
            verify_model(model, KEY.public)
        assert "b'" not in str(raised.value)  # bytes of digests, as the library says it
        assert name != "changed" or not accepted_by_command(model)
        shutil.rmtree(model)
        shutil.copytree(copy, model)
        (model.parent / "elsewhere").unlink(missing_ok=True)
