"""Trackers: what they are told, and that whatever they do, the run goes on."""

from __future__ import annotations

import json
import os
import sqlite3
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from support.cli import QWEN2, ROWS, SMALL, flags, write_rows
from support.events import hearing
from support.training import trackers

from wgpu_lora.api.multi_adapter import MultiAdapterPipeline
from wgpu_lora.cli.app import main
from wgpu_lora.errors import TrackingWarning, UserError
from wgpu_lora.train.options.training_arguments import TrainingArguments, from_values
from wgpu_lora.train.run.training_log import read_log
from wgpu_lora.train.track.trackers import TRACKERS, GuardedTracker, TrackedRun, trackers_of

METRICS = {"train/loss": 1.5, "train/global_step": 1.0}


@pytest.fixture
def tracked(tmp_path: Path) -> TrackedRun:
    return TrackedRun("20260101-000000-abcdef", "nf4_lora_sft_f32", str(tmp_path), config={"lora_r": 4})


def start(name: str, tracked: TrackedRun, monkeypatch: pytest.MonkeyPatch) -> GuardedTracker:
    monkeypatch.setitem(TRACKERS, "fake", getattr(trackers, name))
    return GuardedTracker("fake", tracked)


def read_events(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / trackers.SEEN).read_text().splitlines()]


def test_what_a_tracker_is_told(
    tracked: TrackedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracker = start("Writing", tracked, monkeypatch)
        tracker.log(METRICS, 1)
        tracker.finish("finished")
    assert read_events(tmp_path) == [{"begin": vars(tracked)}, {"step": 1, **METRICS}, {"finish": "finished"}]
    assert tracker.url == str(tmp_path)
    assert capsys.readouterr() == ("", "noise on standard output\n")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("RaisingAtStart", "ConnectionError: no route to the server"),
        ("Raising", "ValueError: no such metric"),
        ("Exiting", "SystemExit: 3"),
    ],
)
def test_a_tracker_that_fails_costs_one_warning(
    name: str, why: str, tracked: TrackedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(TrackingWarning, match=why) as warned:  # noqa: PT031
        tracker = start(name, tracked, monkeypatch)
        tracker.log(METRICS, 1)
        tracker.log(METRICS, 2)
        tracker.finish("finished")
        tracker.finish("finished")
    assert len(warned) == 1


def test_the_option() -> None:
    assert trackers_of("wandb, jsonl,tensorboard,wandb") == ["wandb", "tensorboard"]
    assert trackers_of("none") == trackers_of("jsonl") == trackers_of(None) == []
    assert from_values({"report_to": ["wandb", "trackio"]}, "here").report_to == "wandb,trackio"
    with pytest.raises(UserError, match="tensorboard, wandb, trackio, jsonl, not 'mlflow'"):
        TrainingArguments(report_to="wandb,mlflow")


def test_a_missing_library_is_said_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Absent(trackers.Writing):
        module, extra = "wandb_that_is_not_there", "wandb"

    monkeypatch.chdir(tmp_path)
    Path(Absent.module).mkdir()  # the folder of its runs is not the library
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(TRACKERS, "wandb", Absent)
    arguments = {**SMALL, "model": QWEN2, "data": write_rows(tmp_path / "rows.jsonl", ROWS), "output": tmp_path / "run"}
    assert main(["finetune", *flags(**arguments), "--report-to", "jsonl", "--report-to", "wandb"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--report-to wandb needs wandb_that_is_not_there, which is not installed: " in line
    assert not (tmp_path / "run").exists()


def test_runs_of_a_pipeline_and_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRACKERS, "trackio", trackers.Writing)
    rows = str(write_rows(tmp_path / "rows.jsonl", ROWS))
    places = [tmp_path / name for name in ("one", "two")]
    adapters = [{"data": rows, "checkpoint": str(place)} for place in places]
    options = {**SMALL, "model": QWEN2, "report_to": "trackio", "output": str(tmp_path / "all")}
    shown: list[tuple[str, str, str]] = []
    events = hearing(tracked=lambda *arguments: shown.append(arguments))
    for changes in ({}, {"max_steps": 3, "resume": True}):
        MultiAdapterPipeline(adapters, **{**options, **changes}).train(events=events)
    assert sorted(shown) == [("trackio", str(place), place.name) for place in places for _ in range(2)]
    for place in places:
        records = read_events(place)
        first, second = (entry["begin"] for entry in records if "begin" in entry)
        assert first["id"] == second["id"]
        assert (first["group"], first["step"], second["step"]) == ("all", 0, 2)
        assert first["name"] == f"qwen2_nf4_lora_sft_f32 {place.name}"
        assert first["config"]["lora_r"] == SMALL["lora_r"]
        logged = [
            {name: entry.get(f"train/{name}") for name in ("global_step", "loss", "learning_rate", "epoch")}
            for entry in records
            if "train/loss" in entry
        ]
        lines = read_log(place / "log.jsonl")
        assert logged == [{"global_step": line["step"], **{n: line[n] for n in list(logged[0])[1:]}} for line in lines]
        assert records[-1] == {"finish": "finished"}


# -- the libraries, without a network ----------------------------------------------------------------------------------


def report(name: str, tracked: TrackedRun) -> None:
    """A run of two steps, and the same run resumed after the first."""
    pytest.importorskip(TRACKERS[name].module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (0, 1):
            tracker = GuardedTracker(name, TrackedRun(**{**vars(tracked), "step": step}))
            tracker.log(METRICS, step + 1)
            tracker.finish("finished")


def test_tensorboard(tracked: TrackedRun, tmp_path: Path) -> None:
    """Two runs within a second have a file each."""
    report("tensorboard", tracked)
    files = list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
    content = b"".join(file.read_bytes() for file in files)
    assert len(files) == 2
    assert content.count(b"train/loss") == 2


def test_wandb_offline(tracked: TrackedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    report("wandb", tracked)
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*/run-{tracked.id}.wandb"))
    assert files
    for _ in range(100):  # its service writes after the run has finished
        if all(b"train/loss" in file.read_bytes() for file in files):
            return
        time.sleep(0.1)
    pytest.fail("a file has no loss")


def test_trackio_local(tracked: TrackedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("TRACKIO_SPACE_ID", raising=False)
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    report("trackio", tracked)
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        records = connection.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    assert [(name, step) for name, step, _ in records] == [(f"{tracked.name} {tracked.id}", step) for step in (1, 2)]
    assert json.loads(records[0][2])["train/loss"] == METRICS["train/loss"]
