"""Reports of runs that are missing, damaged or odd, and reports that are interrupted."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.reports import copied, page_of, profile_of

from wgpu_lora.cli import main
from wgpu_lora.locks import locked
from wgpu_lora.train.run.pipeline_state import PipelineState, read_pipeline_state, write_pipeline_state


def test_a_pipelines_directory_stands_for_its_adapters(
    finished_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(shutil.copytree(finished_pipeline / "run", tmp_path / "run"))
    state = json.dumps(vars(read_pipeline_state(Path("pipeline"))))  # which names the place of the training
    moved = state.replace(str(finished_pipeline / "run"), str(tmp_path / "run"))
    write_pipeline_state(Path("pipeline"), PipelineState(**json.loads(moved)))
    assert main(["report", "pipeline"]) == 0
    out = capsys.readouterr().out
    assert [line.split("**")[1] for line in out.splitlines()[:3]] == ["a", "b", "c"]
    assert "not given" not in out
    assert main(["report", "a"]) == 0
    assert "trained together with these, but not given: b, c" in capsys.readouterr().out
    for given, message in (
        ("pipeline b", "b is given twice"),
        (".", "such as a b"),
        ("b/last", "holds a checkpoint"),
    ):
        assert main(["report", *given.split()]) == 2
        assert message in capsys.readouterr().err
    Path("b", "run.json").unlink()
    for given, message in (("b", "wait until it has ended"), ("pipeline", "trained an adapter in ")):
        assert main(["report", given]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["memory.groups", "data.summary", "environment.versions", "adapter_sha256"])
def test_every_fact_is_read_before_anything_is_drawn(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    facts = json.loads((runs / "first" / "run.json").read_text())
    *groups, name = missing.split(".")
    del (facts[groups[0]] if groups else facts)[name]
    (tmp_path / "run.json").write_text(json.dumps(facts))
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    assert f"cannot be read: '{missing}' is missing" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_refusals(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text('{"state": 3}')
    (tmp_path / "file").write_text("")
    first, no_directory = runs / "first", f"{tmp_path / 'file'} is not a directory: choose another --output"
    for given, output, message in (
        ([first, runs / "second" / ".." / "first"], "out", "is given twice"),
        ([tmp_path / "none"], "out", "There is no directory"),
        ([tmp_path], "out", "cannot be read"),
        ([first], "file", no_directory),
        ([first], "file/below", no_directory),
    ):
        assert main(["report", *map(str, given), "--output", str(tmp_path / output)]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_fails_leaves_no_directory(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    for place in ("a/b/page", "kept/c/page"):
        with pytest.raises(KeyboardInterrupt), locked(tmp_path / place, "--output"):
            raise KeyboardInterrupt
    assert list(tmp_path.rglob("*")) == [tmp_path / "kept"]


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


def test_odd_values_are_drawn(runs: Path, tmp_path: Path) -> None:
    run = copied(runs, tmp_path / "run", {"data": {"summary": "\x1b\u202e.jsonl: <1 row>"}})
    odd = [{"step": 4, "epoch": 1, "loss": 1e308, "tokens": -9, "seconds": -1e308}]
    odd += [{"step": 5, "epoch": 1, "loss": -1e308, "tokens": 5e-324, "seconds": 1e308}]
    (run / "log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in odd))
    (run / "profile.json").write_text(json.dumps(profile_of(run) | {"kernels": [{"kernel": "k", "seconds": -1}]}))
    assert main(["report", str(run), "--output", str(tmp_path / "out")]) == 0
    assert any("-1.0 is not a valid amount" in text for text in page_of(tmp_path / "out").text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory": {"peak": -1}}, "cannot be read"),
        ({"state": {"seconds": math.inf}}, "cannot be read"),
        ({"memory": {"groups": {"base": math.nan}}}, "'memory.groups.base' must be a whole number, not NaN"),
    ],
)
def test_odd_facts_are_named(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    run = copied(runs, tmp_path / "run", changes)
    assert main(["report", str(run), "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
