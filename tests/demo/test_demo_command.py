"""wgpu-lora demo: what it shows, and that what it says last can be done."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from wgpu_lora.cli import console
from wgpu_lora.cli.app import main
from wgpu_lora.demo.before_and_after import CheckedAnswer
from wgpu_lora.files.assets import DEMO_HELDOUT

command = import_module("wgpu_lora.cli.demo")


@pytest.mark.rare
def test_its_last_line_works_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the directory it was run in: a held-out request, answered as it was answered there."""
    few = tmp_path / "held out.jsonl"
    few.write_text("".join(DEMO_HELDOUT.read_text().splitlines(keepends=True)[:2]))
    for where in ("wgpu_lora.train.prepare_job", "wgpu_lora.demo.before_and_after"):
        monkeypatch.setattr(f"{where}.DEMO_HELDOUT", few)
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--max-steps", "1", "--output", "the run", "--show", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    report = json.loads((tmp_path / "the run" / "demo.json").read_text())
    labels = [line.split(" ")[0] for line in lines]
    assert labels.index("before") < labels.index("step") < labels.index("finished") < labels.index("written")
    assert "tuning" not in labels
    loss = report["after"]["loss"]
    assert f"held-out requests pass their checks; held-out loss {loss:.4f}" in lines[len(lines) - 5]
    assert report["before"]["loss"] != loss
    assert "knows one task" in lines[-3]
    assert "generate --adapter 'the run' --prompt " in lines[-1]
    process = subprocess.run(lines[-1], shell=True, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    after = dict(zip(report["requests"], report["after"]["answers"], strict=True))
    request = next(text for text in after if text in lines[-1].replace("'\"'\"'", "'"))
    assert process.stdout.startswith(after[request]["text"])
    assert after[request]["text"]


CODE = "def f(xs):\n    return sorted(out, reverse=True)"  # of 36 columns


def test_code_is_not_broken_in_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(console, "PLAIN_WIDTH", 80)
    long = CODE.replace("out,", "[x for x in xs if x % 2],")  # it does not fit beside another
    reason = "assertion failed: f([1]) == [2], where f returned [1]"
    for before in (CODE, long):
        command._side_by_side(
            "Write f(xs). " * 10, CheckedAnswer(before, False, reason), CheckedAnswer(CODE, True, "passed")
        )
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        rows = [line for line in lines if "sorted(" in line]
        assert len(rows) == (1 if before is CODE else 2)
        assert all(code.splitlines()[-1] in "\n".join(rows) for code in (before, CODE))
        assert [line for line in lines if "PASS" in line]
        assert f"before: {reason}" in lines


def test_a_program_that_is_started_by_its_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a checkout, whose environment is not on PATH."""
    scripts = tmp_path / ".venv" / "bin"
    scripts.mkdir(parents=True)
    (scripts / "wgpu-lora").write_text("")
    monkeypatch.setattr(sys, "executable", str(scripts / "python"))
    monkeypatch.chdir(tmp_path)
    assert command.program() == ".venv/bin/wgpu-lora"
