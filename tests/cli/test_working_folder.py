"""The folder that a command is started in: nothing of it is executed, whatever lies there, and it may go."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cli import QWEN2, SMALL, Run, flags, write_rows

from wgpu_lora.events import Events
from wgpu_lora.files import paths
from wgpu_lora.files.assets import PACKAGE
from wgpu_lora.train.job import Job

MODULES = ("json", "numpy", "tokenizers", "jinja2", "re2", "wgpu_lora", "sitecustomize", "usercustomize", "psutil")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder whose modules, and whatever its .git/config names, write to the file `executed` if they are run."""
    folder, executed = tmp_path / "folder", tmp_path / "executed"
    folder.mkdir()
    for name in MODULES:
        code = f"open({str(executed)!r}, 'a').write({name!r})\nraise SystemExit(7)\n"
        (folder / f"{name}.py").write_text(code)
    own = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init"], ["add", "json.py"], ["commit", "-m", "x"]):
        subprocess.run([*own, *command], check=True, capture_output=True)
    (folder / ".gitattributes").write_text("*.py filter=a\n")
    with (folder / ".git" / "config").open("a") as config:
        config.write(f'[core]\n\tfsmonitor = "echo git >> {executed}; false"\n')
        config.write(f'[filter "a"]\n\tclean = "echo filter >> {executed}; cat"\n')
    (folder / "json.py").touch()
    return folder


def started(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "wgpu_lora", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def test_a_hostile_folder_runs_nothing(hostile: Path) -> None:
    """Not even beside a file of rewards, which may import what is beside it."""
    place = hostile.parent / "own"
    place.mkdir()
    (place / "sibling.py").write_text("REWARD = 0.25\n")
    (place / "rewards.py").write_text(
        "from sibling import REWARD\ndef of_sibling(completions, **columns):\n    return [REWARD] * len(completions)\n"
    )
    data = write_rows(place / "rows.jsonl", [{"prompt_ids": [1 + i, 2, 3]} for i in range(4)])
    options = {
        **SMALL, "model": QWEN2, "data": data, "output": place / "out", "objective": "grpo", "max_steps": 1,
        "reward_funcs": f"length:4,regex:a,{place}/rewards.py:of_sibling", "num_generations": 2,
        "max_completion_length": 4, "eval_data": data, "tune": False,
    }  # fmt: skip
    process = started(hostile, "finetune", *flags(**options))
    assert process.returncode == 0, process.stderr
    assert "failed" not in process.stderr
    process = started(
        hostile, "evaluate", *flags(model=QWEN2, adapter=place / "out", data=write_rows(place / "e.jsonl"))
    )
    assert process.returncode == 0, process.stderr
    assert not (hostile.parent / "executed").exists()


def test_every_python_child_is_started_by_one_function() -> None:
    """With -P, so that no file in the current folder is imported."""
    starts = []
    texts = {path.name: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    for name, text in texts.items():
        for node in ast.walk(ast.parse(text if "sys.executable" in text else "")):
            words = node.elts if isinstance(node, ast.List | ast.Tuple) else []
            starts += [name for word in words if ast.unparse(word) == "sys.executable"]
    assert starts == ["child_process.py"]


def test_a_folder_that_is_removed_does_not_end_a_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for at the start; where it is missing then, that is said."""
    folder, data = tmp_path / "folder", write_rows(tmp_path / "rows.jsonl")
    folder.mkdir()
    monkeypatch.chdir(folder)
    options = {**SMALL, "model": QWEN2, "data": data, "output": tmp_path / "out", "save_steps": 1, "tune": False}
    options |= {"goal": "token=sk-12345678abcdef", "notes": "password=hunter2hunter2"}
    prepare = Job._begin

    def removed(job: Any, events: Events) -> None:
        folder.rmdir()
        prepare(job, events)

    with monkeypatch.context() as patched:
        patched.setattr(Job, "_begin", removed)
        assert run("finetune", *flags(**options)).code == 0
    facts = json.loads((tmp_path / "out" / "checkpoints" / "step-2" / "metadata.json").read_text())
    assert facts["directory"] == str(folder)
    assert not (tmp_path / "out" / ".lock").exists()
    texts = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not [text for text in texts if b"sk-12345678abcdef" in text or b"hunter2" in text]
    paths._folders.clear()
    assert run("info").refusal() == "wgpu-lora: The current folder does not exist any more: change to another."


TEXTS = {
    "recipe": ["finetune", "--recipe", "{pipe}"],
    "chain": ["run", "{pipe}"],
    "job": ["worker", "{pipe}"],
    "results": ["bench", "compare", "{pipe}", "{pipe}"],
    "key": ["protect", "open", "{pipe}", "--key", "{pipe}", "--output", "{out}"],
    "data": ["evaluate", "--model", QWEN2, "--data", "{pipe}"],
    "model": ["plan", "--model", "{pipe}"],
    "lock": ["data", "prepare", "{rows}", "--output", "{locked}"],
}


@pytest.mark.parametrize("kind", TEXTS)
def test_pipes_are_refused(run: Run, tmp_path: Path, kind: str) -> None:
    """Opening one would wait for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    os.mkfifo(tmp_path / ".locked.lock")
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    places = {"pipe": pipe, "out": tmp_path / "out", "locked": tmp_path / "locked", "rows": rows}
    result = run(*[word.format(**places) for word in TEXTS[kind]])
    assert result.code == 2
    assert "file" in result.err
    assert "Traceback" not in result.err


def test_sockets_and_devices_are_no_files(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        refused = {tmp_path / "s": "device or address", Path("/dev/zero"): "not a regular file", tmp_path: "directory"}
        for path, words in refused.items():
            with pytest.raises(OSError, match=words):
                paths.open_file(path)
