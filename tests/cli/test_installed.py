"""The commands that messages print fit how the package was installed, and those of the tutorial work."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
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


# -- docs/tutorial.md does what it says --------------------------------------------------------------------------------

TUTORIAL = ROOT / "docs" / "tutorial.md"


@pytest.mark.rare
def test_every_command_works(tmp_path: Path) -> None:
    script = "\n".join(re.findall(r"^```sh\n(.*?)^```$", TUTORIAL.read_text(), re.DOTALL | re.MULTILINE))
    assert script.count("wgpu-lora ") >= 8
    environment = {name: value for name, value in os.environ.items() if name != "WGPU_LORA_NO_TUNE"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=ROOT,
        env=environment | {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    before, _, after = done.stdout.partition("finished ")
    asked = {"double_even": "x * 2 for x in xs if x % 2 == 0", "add_numbers": "x + 1 for x in xs if x > 3"}
    for name, value in asked.items():
        answer = f"def {name}(xs: list[int]) -> list[int]:\n    return [{value}]"
        assert answer not in before
        assert answer in after
    place = tmp_path / "house-style"
    assert len((place / "train.jsonl").read_text().splitlines()) == 50
    state = json.loads((place / "house-style" / "run.json").read_text())["state"]
    assert state["step"] == 150
    assert state["first_eval_loss"] > 5
    assert state["last_eval_loss"] < 0.4
    answers = [json.loads(line) for line in (place / "answers.jsonl").read_text().splitlines()]
    assert sum(row["response"] == row["messages"][-1]["content"] for row in answers) > 5
    for name in ("report/report.html", "house-style.gguf", "house-style/README.md", "house-style/tokenizer.json"):
        assert (place / name).stat().st_size > 1000, name
