"""Result files of any kind in one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.bench import result

from wgpu_lora.bench.brick_results import SCHEMA
from wgpu_lora.bench.result_comparison import read_measured
from wgpu_lora.cli import main
from wgpu_lora.errors import UserError

HEAD: dict[str, Any] = {"kind": "header", "device": {"name": "A"}, "time": "2026-11-22T12:00:00+00:00"}
TRAINING = HEAD | {
    "schema": "wgpu-lora-bench-training/2",
    "work": {"recipe": "demo", "options": {"lora_r": 16, "output": "x", "new": 1}},
}
BATCHES = HEAD | {"schema": "wgpu-lora-bench-max-batch/2", "work": {"model": "demo", "layers": 2}}
NAMES = ("seconds", "samples_per_second", "tokens_per_second", "trained_tokens_per_second", "final_loss")
SUMMARY = {"kind": "summary", "spread": {name: {"median": 2.0} for name in NAMES}, "memory": {"peak": 1024}}
PAIR = {"kind": "pair", "batch": 2, "accumulation": 4, "samples_per_second": 3.0}
ROWS = [
    {"kind": "batch", "batch": rows, "gradient_checkpointing": way, "status": status, **figures}
    for rows, way, status, figures in (
        (4, False, "MAX", {"step_seconds": 0.5, "tokens_per_second": 10.0, "planned": 2048}),
        (5, False, "OOM", {"step_seconds": None, "tokens_per_second": None, "planned": None}),
        (8, True, "OK", {"step_seconds": 1.0, "tokens_per_second": 5.0, "planned": 1024}),
    )
]


def write(path: Path, *lines: Any) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_all_kinds_in_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = TRAINING["work"]["options"]
    other = TRAINING | {"device": {"name": "B"}, "work": {"recipe": "demo", "options": {**options, "lora_r": 8}}}
    del other["work"]["options"]["new"]
    faster = {**SUMMARY, "spread": {**SUMMARY["spread"], "seconds": {"median": 1.0}}}  # type: ignore[dict-item]
    files = [
        write(tmp_path / "a.jsonl", TRAINING, SUMMARY),
        write(tmp_path / "b.jsonl", other, faster, PAIR),
        write(tmp_path / "c.jsonl", BATCHES, *ROWS),
        write(tmp_path / "d.jsonl", HEAD | {"schema": SCHEMA, "options": {}}, result("rope", 0.25).record()),
    ]
    assert main(["bench", "compare", *files[:2]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "file      a: training, A, 2026-11-22T12:00:00+00:00"
    assert lines[2] == "differs   lora r: 16, 8"  # and nothing of paths, or of options of other versions
    assert [line.split() for line in lines[3:5]] == [
        ["measured", "a", "b", "new", "/", "old"],
        ["recipe", "demo:", "time", "2", "s", "1", "s", "0.500"],
    ]
    assert "recipe demo: samples, 2 x 4" in lines[-1]
    assert main(["bench", "--compare", *files]) == 0
    out = capsys.readouterr().out
    assert "demo, 2 layers, largest batch, checkpointing" in out
    assert "demo, 2 layers, 8 rows, checkpointing: tokens" in out
    assert "5 rows" not in out
    assert "250 ms" in out
    faster_rope = result("rope", 0.125).record()
    rope = write(tmp_path / "f.jsonl", HEAD | {"schema": SCHEMA, "options": {}, "device": {"name": "B"}}, faster_rope)
    assert main(["bench", "compare", files[3], rope]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in ("warning   name: A before, B now", "faster", "0.500"))
    load = write(tmp_path / "e.jsonl", HEAD | {"schema": SCHEMA, "options": {}}, result("load").record())
    assert main(["bench", "compare", files[3], load]) == 2
    assert "have no brick in common" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty, as after an interrupted run"),
        ([TRAINING], "has no results, as after an interrupted run: measure it again"),
        ([TRAINING | {"schema": "wgpu-lora-bench-training/1"}], "has version 1 of its schema, .* reads 2"),
        ([{"schema": "zork/1"}], r"has the schema 'zork/1', expected 'wgpu-lora-bench/1' or 'wgpu-lora-bench-training"),
        ([TRAINING | {"device": 3}], "is damaged .*'device' must be an object|is damaged .*'device'"),
        ([TRAINING | {"work": {}}, SUMMARY], "is damaged"),
        ([TRAINING, SUMMARY | {"spread": {}}], "is damaged"),
        ([TRAINING, SUMMARY | {"memory": {"peak": "x"}}], "is damaged"),
        ([BATCHES | {"work": {"model": "x"}}, *ROWS], "is damaged"),
        ([BATCHES, ROWS[0] | {"batch": "4"}], "is damaged"),
        ([BATCHES, ROWS[0] | {"step_seconds": [1]}], "is damaged"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_measured(write(tmp_path / "a.jsonl", *lines))
