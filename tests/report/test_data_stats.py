"""`data stats` and `plan --measure`: statistics of rows, their page, and projected times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.cli import QWEN2, SMALL, Run, commands, flags
from support.data import write_jsonl

from wgpu_lora.train.time_estimate import HELDOUT, TRAINING, Projection

LENGTHS = [4] * 50 + [20] * 40 + [60] * 9 + [300]
ROWS: list[dict[str, Any]] = [
    {"input_ids": [n % 40 + 1] * length, "labels": [-100] * (length // 2) + [n % 40 + 1] * (length - length // 2)}
    for n, length in enumerate(LENGTHS)
]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return commands(capsys)


def options(tmp_path: Path, **changes: Any) -> list[str]:
    data = write_jsonl(tmp_path / "rows.jsonl", *ROWS)
    given = {"model": QWEN2, "data": data, "max_length": 64, "tune": False, "lora_r": 4}
    return flags(**{name: value for name, value in {**given, **changes}.items() if value is not None})


def test_statistics_of_rows(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    given = [*options(tmp_path), "--no-measure", "--page", page]
    code, said, err = run("data", "stats", *given)
    assert code == 0, err
    assert "lengths   p50 4, p90 20, p99 60, max 300 tokens\n" in said
    assert "format    input_ids: 100 rows\n" in said
    assert f"trained   50% of {sum(LENGTHS):,} tokens\n" in said
    found = json.loads(run("data", "stats", *given, "--json").out)
    assert found["lengths"] == {"p50": 4, "p90": 20, "p99": 60, "max": 300}
    choices = {(one["max_length"], one["packing"]): one for one in found["choices"]}
    assert {length for length, _ in choices} == {64, 128}  # as far as the model's positions
    at = choices[64, True]
    assert (at["cut"], at["lost"], at["tokens"]) == (1, 1, sum(LENGTHS) - 300)  # 64 of 300 tokens are not trained on
    trained = sum(sum(label != -100 for label in row["labels"][1:]) for row in ROWS)
    assert at["trained"] == pytest.approx((trained - 150) / trained)
    assert choices[64, False]["steps"] == -(-99 // 2)
    assert at["positions"] >= at["tokens"]
    assert found["saved_by_packing"] == pytest.approx(1 - at["positions"] / choices[64, False]["positions"])
    text = page.read_text(encoding="utf-8")
    for words in ("Rows of rows.jsonl", '<th scope="row">4</th>', "Not measured.", "Steps an epoch"):
        assert words in text
    assert "<script" not in text


def test_steps_are_those_of_the_run(run: Run, tmp_path: Path) -> None:
    for more in ({}, {"packing": False, "per_device_train_batch_size": 3}, {"validation_split": 0.2}):
        given = options(tmp_path, **more)
        stats = json.loads(run("data", "stats", *given, "--no-measure", "--json", "--page", tmp_path / "a.html").out)
        plan = json.loads(run("plan", *given, "--num-train-epochs", 1, "--json").out)
        assert stats["this_run"]["steps"] == plan["steps"]
    assert stats["heldout"] == 20


def test_projected_time_and_cost(run: Run, tmp_path: Path) -> None:
    small = options(tmp_path, **SMALL | {"max_steps": 40, "eval_data": tmp_path / "rows.jsonl", "eval_steps": 10})
    code, out, err = run("plan", *small, "--measure", "--price-per-hour", 3600, "--json")
    assert code == 0, err
    found = json.loads(out)["projection"]
    assert set(found["stages"]) == {"loading and tuning", "compilation", TRAINING, HELDOUT}
    assert found["seconds"] == pytest.approx(sum(found["stages"].values())) == found["cost"]
    assert found["stages"][TRAINING] > 0 < found["stages"][HELDOUT]
    page = tmp_path / "page.html"
    more = ["--price-per-hour", 2, "--project", "qwen2.5-0.5b", "--page", page]
    pairs = [{"prompt_ids": [1, n % 40 + 1], "chosen_ids": [2, 3], "rejected_ids": [4]} for n in range(10)]
    data = write_jsonl(tmp_path / "pairs.jsonl", *pairs)
    given = SMALL | {"data": data, "objective": "dpo", "precompute_ref_log_probs": True, "validation_split": 2}
    code, said, err = run("data", "stats", *options(tmp_path, **given), *more)
    assert code == 0, err
    assert "format    prompt_ids, chosen_ids, rejected_ids: 10 rows" in said
    assert "precomputed references" in said
    assert "from 5 measured steps; saving is not counted" in said
    code, out, err = run("plan", *small, "--target-seconds", 50, "--measure", "--json")
    assert code == 0, err
    timed = json.loads(out)["projection"]["stages"]  # held-out losses before and after it are not part of the time
    assert set(timed) == {"loading and tuning", TRAINING, HELDOUT}
    assert timed[TRAINING] == 50
    assert "projected qwen2.5-0.5b: " in said
    text = page.read_text(encoding="utf-8")
    assert "at 2 an hour" in text
    assert "qwen2.5-0.5b" in text
    assert not (tmp_path / "output").exists()


def test_a_projection_adds_its_stages_up() -> None:
    found = Projection({"loading and tuning": 2.0, TRAINING: 3590.0, HELDOUT: 8.0}, 5, 2.0, 100, 10)
    assert (found.total, found.steps, found.cost(1.5)) == (3600, 3598, 1.5)
    assert found.rates() == {"tokens_per_second": 50, "samples_per_second": 5, "seconds": 3598}


def test_what_is_refused(run: Run, tmp_path: Path) -> None:
    given = options(tmp_path)
    rows = tmp_path / "rows.jsonl"
    before = rows.read_bytes()
    for command, words in (
        (["data", "stats", *given, "--page", rows], "exists already and is not a page: give --page another name"),
        (["data", "stats", *given, "--page", tmp_path], "is not a file"),
        (["data", "stats", *given, "--page", tmp_path / "no" / "page.html"], "no of --page does not exist"),
        (["data", "stats", *given, "--price-per-hour", "-1"], "--price-per-hour must be 0 or more, not -1"),
        (["data", "stats", *given, "--price-per-hour", "nan"], "--price-per-hour must be 0 or more, not nan"),
        (["data", "stats", *given, "--project", "qwen9"], "qwen9"),
        (["data", "stats", *given, "--no-measure", "--price-per-hour", "1"], "need measured steps"),
        (["plan", *given, "--price-per-hour", "1"], "--price-per-hour does nothing without --measure"),
        (["plan", *options(tmp_path, data=None), "--measure", "--adapters", f"{rows}:{tmp_path / 'a'}",
          "--adapters", f"{rows}:{tmp_path / 'b'}"], "Only the steps of a single adapter are measured"),
    ):  # fmt: skip
        code, _, err = run(*command)
        assert (code, words in err) == (2, True), err
    assert rows.read_bytes() == before
