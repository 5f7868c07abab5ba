"""Reports of runs that are missing, damaged or odd, and reports that are interrupted."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.reports import copied, page_of, profile_of
from support.training import model_dir

from wgpu_lora.cli import main
from wgpu_lora.locks import locked


def test_a_pipelines_directory_stands_for_its_adapters(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = str(runs / "rows.jsonl")
    adapters = [f"--adapters={rows}:{name}" for name in ("one", "two")]
    common = ["--model", str(model_dir("qwen2")), "--max-length", "16", "--lora-r", "4", "--max-steps", "1"]
    assert main(["finetune", *common, *adapters, "--output", "both"]) == 0
    capsys.readouterr()
    assert main(["report", "both"]) == 0
    out = capsys.readouterr().out
    assert [line.split("**")[1] for line in out.splitlines()[:2]] == ["one", "two"]
    assert "not given" not in out
    assert main(["report", "one"]) == 0
    assert "trained together with these, but not given: two" in capsys.readouterr().out
    assert main(["report", "both", "two"]) == 2
    assert "two is given twice" in capsys.readouterr().err
    assert main(["report", "."]) == 2
    assert "such as one two." in capsys.readouterr().err
    assert main(["report", "two/last"]) == 2
    assert "holds a checkpoint" in capsys.readouterr().err
    (tmp_path / "two" / "run.json").unlink()
    assert main(["report", "two"]) == 2
    assert "wait until it has ended" in capsys.readouterr().err
    assert main(["report", "both"]) == 2
    assert "trained an adapter in two" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "missing"),
    [
        (lambda facts: facts["memory"].pop("groups"), "memory.groups"),
        (lambda facts: facts["data"].pop("summary"), "data.summary"),
        (lambda facts: facts["environment"].pop("versions"), "environment.versions"),
        (lambda facts: facts.pop("adapter_sha256"), "adapter_sha256"),
    ],
)
def test_every_fact_is_read_before_anything_is_drawn(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Any, missing: str
) -> None:
    facts = json.loads((runs / "first" / "run.json").read_text())
    damage(facts)
    (tmp_path / "run.json").write_text(json.dumps(facts))
    capsys.readouterr()
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    assert f"cannot be read: '{missing}' is missing" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_is_given_once(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs / "first"), str(runs / "second" / ".." / "first")]) == 2
    assert "is given twice" in capsys.readouterr().err


def test_refusals(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "There is no directory" in capsys.readouterr().err
    (tmp_path / "run.json").write_text('{"state": 3}')
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    for output in ("file", "file/below"):
        assert main(["report", str(runs / "first"), "--output", str(tmp_path / output)]) == 2
        assert f"{tmp_path / 'file'} is not a directory: choose another --output" in capsys.readouterr().err


def test_what_fails_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), locked(tmp_path / "a" / "b" / "page", "--output"):
        raise KeyboardInterrupt
    assert not (tmp_path / "a").exists()
    (tmp_path / "kept").mkdir()
    with pytest.raises(KeyboardInterrupt), locked(tmp_path / "kept" / "c" / "page", "--output"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == [tmp_path / "kept"]
    assert list((tmp_path / "kept").iterdir()) == []


ENDED = """
import os, signal, sys
from wgpu_lora import atomic
write = os.fsync
def fsync(descriptor):
    write(descriptor)
    os.kill(os.getpid(), signal.SIGTERM)
os.fsync = fsync
from wgpu_lora.cli import main
sys.exit(main(["report", *sys.argv[1:]]))
"""


@pytest.mark.skipif(os.name == "nt", reason="has no SIGTERM that is handled")
def test_a_signal_while_it_writes_leaves_nothing(runs: Path, tmp_path: Path) -> None:
    arguments = [str(runs / "first"), "--output", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", ENDED, *arguments], capture_output=True, text=True)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_odd_values_are_drawn_or_named(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copied(runs, tmp_path / "run")
    facts = json.loads((run / "run.json").read_text())
    facts["data"]["summary"] = "\x1b\u202e.jsonl: <1 row>"
    (run / "run.json").write_text(json.dumps(facts))
    odd = [{"step": 4, "epoch": 1, "loss": 1e308, "tokens": -9, "seconds": -1e308}]
    odd += [{"step": 5, "epoch": 1, "loss": -1e308, "tokens": 5e-324, "seconds": 1e308}]
    (run / "log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in odd))
    (run / "profile.json").write_text(json.dumps(profile_of(run) | {"kernels": [{"kernel": "k", "seconds": -1}]}))
    assert main(["report", str(run), "--output", str(tmp_path / "out")]) == 0
    assert any("-1.0 is not a valid amount" in text for text in page_of(tmp_path / "out").text)
    for group, name, value in (("memory", "peak", -1), ("state", "seconds", math.inf)):
        odd_facts = facts | {group: facts[group] | {name: value}}
        (run / "run.json").write_text(json.dumps(odd_facts))
        capsys.readouterr()
        assert main(["report", str(run), "--output", str(tmp_path / "out")]) == 2
        assert "cannot be read" in capsys.readouterr().err
    facts["memory"]["groups"]["base"] = math.nan
    (run / "run.json").write_text(json.dumps(facts))
    capsys.readouterr()
    assert main(["report", str(run), "--output", str(tmp_path / "out")]) == 2
    assert "'memory.groups.base' must be a whole number, not NaN" in capsys.readouterr().err
