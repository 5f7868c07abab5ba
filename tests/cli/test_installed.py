"""The commands that messages print fit how the package was installed."""

from __future__ import annotations

import json
import shlex
import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
from support import ROOT

from wgpu_lora import installation

HERE = ROOT


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A virtual environment with a pip, in a directory that is the current one; returns what sets direct_url.json."""
    scripts = tmp_path / ".venv" / "bin"
    scripts.mkdir(parents=True)
    for name in ("python", "pip", "wgpu-lora"):
        (scripts / name).write_text("")
        (scripts / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(scripts / "python"))
    monkeypatch.setattr(sys, "prefix", str(scripts.parent))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)

    def came(direct_url):
        text = None if direct_url is None else json.dumps(direct_url)
        monkeypatch.setattr(installation, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))

    return came


def test_a_checkout(environment, tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text("")
    environment({"url": tmp_path.as_uri(), "dir_info": {"editable": True}})
    assert installation.pip_line("plot") == ".venv/bin/pip install -e '.[plot]'"
    assert installation.program() == ".venv/bin/wgpu-lora"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert installation.pip_line("plot") == f"{tmp_path}/.venv/bin/pip install -e '{tmp_path}[plot]'"
    monkeypatch.setenv("PATH", str(tmp_path / ".venv" / "bin"))  # activated
    assert installation.pip_line("plot") == f"pip install -e '{tmp_path}[plot]'"
    assert installation.program() == "wgpu-lora"


def test_a_path_with_a_space_and_a_copy_that_is_not_in_place(environment, tmp_path):
    place = tmp_path / "my code"
    place.mkdir()
    (place / "pyproject.toml").write_text("")
    environment({"url": place.as_uri(), "dir_info": {}})
    assert shlex.split(installation.pip_line("nvml")) == [".venv/bin/pip", "install", f"{place}[nvml]"]
    (place / "pyproject.toml").unlink()  # the checkout is gone
    assert installation.pip_line("nvml") == ".venv/bin/pip install 'wgpu-lora[nvml]'"


@pytest.mark.parametrize(
    ("direct_url", "requirement"),
    [
        (None, "wgpu-lora[plot]"),
        ({"url": "file:///tmp/wgpu_lora-0.1-py3-none-any.whl", "archive_info": {}}, "wgpu-lora[plot]"),
        (
            {"url": "https://host/x.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "wgpu-lora[plot] @ git+https://host/x.git@abc",
        ),
        ({"url": 3}, "wgpu-lora[plot]"),
        ({"nothing": 1}, "wgpu-lora[plot]"),
    ],
)
def test_other_origins(environment, direct_url, requirement):
    environment(direct_url)
    assert shlex.split(installation.pip_line("plot"))[-1] == requirement


@pytest.mark.parametrize(
    ("mark", "command"),
    [("uv-receipt.toml", "uv tool install"), ("pipx_metadata.json", "pipx install --force")],
)
def test_tools_of_their_own_environment(environment, tmp_path, mark, command):
    environment(None)
    (tmp_path / ".venv" / mark).write_text("")
    assert installation.pip_line("plot") == f"{command} 'wgpu-lora[plot]'"


def test_run_from_its_source(environment, monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(installation, "distribution", missing)
    assert installation.pip_line("plot") == f".venv/bin/pip install -e '{HERE}[plot]'"
