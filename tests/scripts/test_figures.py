"""The table of training speeds by device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.figures import FOLDER, PAGE, WEB_SCHEMA, Figures, main, page, read_figures

SCHEMA = "wgpu-lora-bench-reference/1"
OURS = {
    "shape": "smollm2-135m", "layers": 1, "rank": 8, "work": "1 x 512", "side": "ours q4_1", "ratio": 0.25,
    "tokens_per_second": 1234.4, "planned": 1 << 20, "resident": 2 << 20, "joules_per_token": 0.0123,
    "environment": {"versions": {"wgpu-lora": "0.2.0", "wgpu": "1"}, "device": {"name": "A GPU", "driver": "Mesa"}},
}  # fmt: skip
THEIRS = {
    **{name: value for name, value in OURS.items() if name not in ("planned", "joules_per_token", "environment")},
    **{"layers": None, "side": "torch bf16", "ratio": 1.0, "device": "cpu", "versions": {"torch": "2", "peft": "3"}},
}
BRICK = {"name": "nf4_matmul m 64", "calls": 2, "seconds": 0.001, "multiply_adds": 1e6}
WEB: dict[str, Any] = {
    "schema": WEB_SCHEMA, "version": 1, "device": "A|GPU", "browser": "Mozilla/5.0 Chrome/156.0.0.0 Safari/537.36",
    "tokens": 64, "model": {"name": "demo", "layers": 4, "base_dtype": "nf4"},
    "results": [BRICK, {**BRICK, "seconds": 0.003}, {**BRICK, "name": "attention_forward", "calls": 1},
                {"name": "rms_norm", "calls": 9, "seconds": 1}, {"name": "training step", "calls": 1, "seconds": 0.25}],
}  # fmt: skip
FAILED = {"side": "torch f32", "not_run": "out of memory"}


def result(tmp_path: Path, **changes: Any) -> Path:
    document = {"schema": SCHEMA, "commit": {"id": "0123456789"}, "processor": "A CPU", "steps": [OURS, THEIRS, FAILED]}
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(document | changes))
    return path


def test_the_page_has_the_table_of_the_files() -> None:
    assert PAGE.read_text() == page()
    assert any(FOLDER.glob("*.json"))


def test_a_side_is_a_row_of_the_table(tmp_path: Path) -> None:
    ours, theirs = read_figures(result(tmp_path)).table()
    assert ours == (
        "| A GPU, Mesa | smollm2-135m, 1 layer, rank 8 | 1 x 512 | ours q4_1 | 1,234 | 0.25 | 1.0 MiB | 2.0 MiB | 12.3 "
        "| wgpu-lora 0.2.0, wgpu 1, commit 01234567 |\n"
    )
    assert theirs == (
        "| A CPU | smollm2-135m, rank 8 | 1 x 512 | torch bf16 | 1,234 | 1.00 |  | 2.0 MiB |  | torch 2, peft 3 |\n"
    )
    assert all(line.count("|") == Figures.head.partition("\n")[0].count("|") for line in (ours, theirs))


def test_the_comparisons_of_a_gpu_report_are_read(tmp_path: Path) -> None:
    parts = [{"job": {"job": "bench"}, "results": [{}]}, {"job": {"job": "comparison"}, "results": [OURS, FAILED]}]
    (line,) = read_figures(result(tmp_path, schema="wgpu-lora-bench-gpu/3", steps=[], parts=parts, commit=None)).table()
    assert "A GPU, Mesa" in line
    assert "commit" not in line


def test_what_a_browser_measured_is_a_row_of_its_own_table(tmp_path: Path) -> None:
    (line,) = read_figures(result(tmp_path, **WEB)).table()
    assert line == "| A GPU | Chromium 156 | demo, 4 layers, nf4 | 64 | 250.0 | 256 | 1.0 | 2.0 |\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": "another/1"}, "is not a result of"),
        ({"quick": True}, "figures are meaningless"),
        ({"steps": [FAILED]}, "has no training step"),
        ({"steps": [{**OURS, "tokens_per_second": "fast"}]}, "has a step without"),
        ({"steps": ["fast"]}, "has no training step"),
        ({**WEB, "results": [BRICK]}, "has a step without"),
        ({**WEB, "results": WEB["results"][2:]}, "has a step without"),
        ({**WEB, "results": [None]}, "has a step without"),
    ],
)
def test_other_files_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = PAGE.read_text()
    assert main([str(result(tmp_path, **changes))]) == 2
    assert message in capsys.readouterr().err
    assert PAGE.read_text() == before
