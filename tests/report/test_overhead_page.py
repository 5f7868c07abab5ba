"""The page about the cost of protected training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.reports import page_of

from wgpu_lora.bench.overhead import ORDERS, Row, Segment, row_of
from wgpu_lora.bench.overhead_results import published, result_file
from wgpu_lora.cli import main
from wgpu_lora.strict_json import to_json

RAW = Segment(180.0, 180.02, 1000, 1001, "target seconds", 0.75, "a" * 64, 4.0)


def measured(order: str, steps: int, label: str = "demo 180s") -> Row:
    protected = replace(RAW, steps=steps, adapter_sha256="b" * 64)
    settings = {"computeDtype": "bf16", "learningRate": 5e-5}
    facts = {"label": label, "model": "demo", "order": order, "gpu_model": "a device"}
    facts |= {"stability_settings": settings, "total_params": 12_345, "trainable_adapter_params": 678}
    return row_of(
        RAW, protected, attestation="verified", runtime_state="zeroized", initial_adapter_sha256="0" * 64, **facts
    )


def written(path: Path, *rows: Row) -> Path:
    path.write_text(to_json(result_file(rows, "a test", {})))
    return path


def test_measured_rows_stand_beside_the_published_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [
        written(tmp_path / "one.json", measured(ORDERS[0], 995), measured(ORDERS[1], 1002)),
        written(tmp_path / "two.json", measured(ORDERS[0], 991, "0.5B <180s>")),
    ]
    assert main(["report", *map(str, files), "--output", str(tmp_path / "page")]) == 0
    out = capsys.readouterr().out
    assert "overhead  demo 180s: Overhead over 2 rows: median +0.15%" in out
    assert "overhead  0.5B <180s>: Overhead over 1 row: median +0.90%" in out
    page = page_of(tmp_path / "page")
    assert page.fetched == []
    said = " ".join(page.text)
    facts = ["+0.50%", "-0.20%", "+0.90%", "0.5B <180s>", "5e-05", "12,345", "1 row below zero: that is noise"]
    facts += [fact for row in published().rows for fact in (f"{row.overhead_pct:+.2f}%", row.label)]
    assert [fact for fact in facts if fact not in said] == []


def test_runs_and_result_files_do_not_mix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(written(tmp_path / "one.json", measured(ORDERS[0], 995)))
    assert main(["report", file, str(tmp_path), "--output", str(tmp_path / "page")]) == 2
    assert "is no result file of 'bench --protected': give such files alone" in capsys.readouterr().err
    assert not (tmp_path / "page").exists()
