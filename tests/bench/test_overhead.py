"""Rows of raw and protected segments: their overhead, when they are clean, and the files that they are kept in."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from wgpu_lora.bench.overhead import ORDERS, Row, Segment, defects, overhead_pct, row_of
from wgpu_lora.bench.overhead_results import (
    interpretation,
    published,
    read_results,
    result_file,
    summarised,
)
from wgpu_lora.errors import UserError

INITIAL, RAW, PROTECTED = "0" * 64, "a" * 64, "b" * 64
SEGMENT = Segment(180.0, 180.02, 1000, 1001, "target seconds", 0.75, RAW, 4.0)
SECOND = replace(SEGMENT, elapsed_sec=180.05, steps=995, adapter_sha256=PROTECTED)
FACTS = {"label": "demo 180s", "model": "demo", "order": ORDERS[0], "initial_adapter_sha256": INITIAL}
GOOD = {"attestation": "verified", "runtime_state": "zeroized"}
# Of https://imladri.pages.dev/research/glasshouse-qwen-lora-wallclock-20260517.json
FIELDS = [
    "label",
    "model",
    "gpuModel",
    "order",
    "targetSec",
    "rawElapsedSec",
    "protectedElapsedSec",
    "rawSteps",
    "protectedSteps",
    "rawFinalLoss",
    "protectedFinalLoss",
    "rawAdapterSha256",
    "protectedAdapterSha256",
    "overheadPct",
    "attestation",
    "runtimeState",
    "cleanModelArtifact",
    "totalParams",
    "trainableAdapterParams",
    "stabilitySettings",
]


def row(overhead: float = 0.5, **changes: Any) -> Row:
    steps = round(100_000 * (1 - overhead / 100))
    raw, protected = replace(SEGMENT, steps=100_000), replace(SECOND, steps=steps, elapsed_sec=180.02)
    return row_of(raw, protected, **(FACTS | GOOD | changes))


def test_the_formula_gives_the_published_overheads_of_published_figures():
    rows = published().rows
    assert [found.overhead_pct for found in rows] == [0.86, -0.45, 0.81, 0.59, 1.11, 0.26, 0.77]
    assert {found.target_sec for found in rows} == {180, 900, 1800, 3600}
    checked = [r for r in rows if r.raw_steps]
    assert len(checked) == 3
    for r in checked:
        again = overhead_pct(r.raw_steps, r.raw_elapsed_sec, r.protected_steps, r.protected_elapsed_sec)
        assert round(again, 2) == r.overhead_pct


def test_a_row_has_the_published_fields():
    with pytest.raises(UserError, match=r"A segment had 0 steps, .* longer --target-seconds"):
        row_of(SEGMENT, replace(SECOND, steps=0), **FACTS, **GOOD)
    made = row_of(SEGMENT, SECOND, **FACTS, **GOOD)
    found = made.to_json()
    assert list(found)[:2] == ["label", "model"]
    assert set(FIELDS) <= set(found)
    assert (found["rawSteps"], found["protectedSteps"], found["rawElapsedSec"]) == (1000, 995, 180.02)
    assert (found["rawStepBudget"], found["rawStopReason"], found["rawOutsideSec"]) == (1001, "target seconds", 4.0)
    assert found["cleanModelArtifact"] is True
    assert found["notClean"] == []
    assert Row.of_json(json.loads(json.dumps(found))) == made


@pytest.mark.parametrize(
    ("raw", "protected", "facts", "reason"),
    [
        ({}, {}, {"attestation": "not verified"}, "the attestation is not verified"),
        ({}, {}, {"runtime_state": "not zeroized"}, "the state of the protected run is not zeroized"),
        ({"final_loss": None}, {}, {}, "the final loss of the raw segment is not finite"),
        ({}, {"final_loss": float("nan")}, {}, "the final loss of the protected segment is not finite"),
        ({"adapter_sha256": INITIAL}, {}, {}, "the adapter of the raw segment is the initial one"),
        ({}, {"adapter_sha256": INITIAL}, {}, "the adapter of the protected segment is the initial one"),
        ({}, {"adapter_sha256": RAW}, {}, "both adapters are the same after different numbers of steps"),
        ({}, {"stop_reason": "non-finite"}, {}, r"the protected segment ended before its target \(non-finite\)"),
        ({"target_sec": 60.0}, {}, {}, "the segments have different targets"),
        ({}, {}, {"initial": None}, "the adapter that the raw segment began with is not known"),
    ],
)
def test_a_row_is_not_clean(raw: dict[str, Any], protected: dict[str, Any], facts: dict[str, Any], reason: str):

    given = {"initial": INITIAL, **GOOD, **facts}
    found = defects(replace(SEGMENT, **raw), replace(SECOND, **protected), **given)
    assert any(re.fullmatch(reason, text) for text in found), found
    assert not defects(SEGMENT, SECOND, INITIAL, **GOOD)


def test_equal_digests_are_explained_by_equal_steps():
    same = replace(SECOND, adapter_sha256=RAW, steps=SEGMENT.steps)
    made = row_of(SEGMENT, same, **FACTS, **GOOD)
    assert made.clean_model_artifact
    assert "both segments took 1,000 steps" in (made.equal_digests or "")
    assert row_of(SEGMENT, SECOND, **FACTS, **GOOD).equal_digests is None


def test_the_summary_has_both_orders_and_says_what_is_noise():
    rows = [row(0.4), row(0.6), row(-0.2, order=ORDERS[1]), row(0.0, order=ORDERS[1])]
    summary = summarised(rows)
    assert summary["all"]["rows"] == 4
    assert summary["all"]["median"] == pytest.approx(0.2)
    assert summary["byOrder"][ORDERS[1]]["median"] == pytest.approx(-0.1)
    assert summary["spreadOfRepeats"] == pytest.approx(0.2)
    assert (summary["negative"], summary["clean"], summary["withinLimit"]) == (1, 4, True)
    said = " ".join(interpretation(rows))
    assert "median +0.20%, from -0.20% to +0.60% (medians by order: raw-first +0.50%; protected-first -0.10%)" in said
    assert "1 row below zero: that is noise, since protection does not make training faster." in said
    assert "differ by up to 0.20 points, so the overhead cannot be told from noise." in said
    alone = " ".join(interpretation([row(3.0, attestation="refused")]))
    assert "above the limit of 1%" in alone
    assert "the spread of repeats is not known" in alone
    assert "Only one order was run" in alone
    assert "demo 180s, raw-first: not clean, because the attestation is refused." in alone


def test_a_file_is_read_back(tmp_path: Path):
    rows, path = [row(0.4), row(-0.2, order=ORDERS[1])], tmp_path / "found.json"
    content = result_file(rows, "demo on a test", {"device": {"name": "x"}})
    assert {"title", "date", "scope", "methodology", "results", "interpretation", "redactionPolicy"} <= set(content)
    path.write_text(json.dumps(content))
    found = read_results(path)
    assert found.rows == rows
    assert found.summary == summarised(rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "zork/1"}, "has the schema 'zork/1', expected 'wgpu-lora-overhead/1'"),
        ({"results": []}, r"is damaged \(it has no rows\)"),
        ({"results": [1]}, "is damaged"),
        ({"results": [row().to_json() | {"overheadPct": 0.1}]}, "is 0.1, but its figures give 0.50"),
        ({"results": [row().to_json() | {"rawSteps": 0}]}, "a segment has no step or no time"),
        ({"results": [row().to_json() | {"overheadPct": None}]}, "is damaged"),
        ({"date": 5}, "is damaged"),
        ({"schema": None}, "has the schema None|has no schema"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: dict[str, Any], message: str):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(result_file([row()], "a test", {}) | change))
    with pytest.raises(UserError, match=message):
        read_results(path)
