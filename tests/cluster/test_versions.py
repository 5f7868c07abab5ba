"""Versions: what must agree on all machines, and the first thing that does not."""

from __future__ import annotations

import shutil
from dataclasses import fields, replace
from pathlib import Path

import pytest

from wgpu_lora.cluster import node_versions
from wgpu_lora.cluster.messages import Versions
from wgpu_lora.cluster.node_versions import difference, own_versions
from wgpu_lora.files import assets
from wgpu_lora.files.assets import PACKAGE, package_files

OURS = Versions("0.1.0", "a" * 64, "b" * 64, "3.11.7", "2.60.0", "0.32.0 (wgpu-native 29.0.1.1)")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("python", "3.12.1", "its Python is 3.12.1, not 3.11.7"),
        ("package", "0.2.0", "its wgpu-lora is 0.2.0, not 0.1.0"),
        ("ray", "", "its Ray is missing, not 2.60.0"),
        ("wgpu", "0.31.0", "its wgpu is 0.31.0, not 0.32.0 (wgpu-native 29.0.1.1)"),
        ("code", "c" * 64, "its wgpu-lora 0.1.0 has other code (SHA-256 cccccccccccc..., not aaaaaaaaaaaa...)"),
        ("shaders", "c" * 64, "its wgpu-lora 0.1.0 has other shaders (SHA-256 cccccccccccc..., not bbbbbbbbbbbb...)"),
    ],
)
def test_the_first_difference_is_said(field: str, value: str, message: str) -> None:
    assert (difference(OURS, replace(OURS, **{field: value})) or "").startswith(message)


def test_every_version_counts_but_the_last_part_of_pythons() -> None:
    for item in fields(Versions):
        assert difference(OURS, replace(OURS, **{item.name: "9"})), item.name
    assert difference(OURS, replace(OURS, python="3.11.9")) is None
    assert difference(OURS, OURS) is None


def test_the_digests_are_of_all_code_and_all_shaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = own_versions()
    assert own == own_versions()
    shutil.copytree(assets.asset_dir("shaders"), tmp_path / "shaders")
    for folder in ("recipes", "bricks"):
        (tmp_path / folder).mkdir()
    package = tmp_path / "wgpu_lora"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "cli" / "__pycache__").mkdir()
    (package / "cli" / "__pycache__" / "x.py").write_text("compiled")
    monkeypatch.setattr(assets, "asset_dir", lambda name: tmp_path / name)
    monkeypatch.setattr(node_versions, "package_files", lambda: package_files(package))
    digest = own_versions.__wrapped__
    assert digest() == own  # wherever it is
    shader = next(path for path in (tmp_path / "shaders").rglob("*.wgsl"))
    shader.write_bytes(shader.read_bytes() + b"\n")
    changed = digest()
    assert (changed.code, changed.shaders != own.shaders) == (own.code, True)
    (package / "cluster" / "more.py").write_text("")
    assert digest().code != own.code
