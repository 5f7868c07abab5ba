"""Greedy answers beside the rows' own, and whether a run worked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cli import Run

import wgpu_lora
from wgpu_lora.cli.run_summary import losses
from wgpu_lora.data import Row
from wgpu_lora.errors import UserError
from wgpu_lora.events import StepResult
from wgpu_lora.infer.exact_match import Match, compared, split_row
from wgpu_lora.train.run.run_outcome import end_warnings, first_and_last
from wgpu_lora.train.run.run_state import RunState
from wgpu_lora.train.track.run_log import HELD_OUT, REWARD, Losses


@pytest.mark.parametrize(
    ("match", "text", "part"),
    [
        (Match(), " a b\n", "a b"),
        (Match(pattern=r"\d+"), "of 12 and 13", "12"),
        (Match(pattern=r"= (\w+)"), "x = yes", "yes"),
        (Match(pattern="z"), "none of it", None),
        (Match(pattern="(a+)|b"), "blue", "b"),
        (Match(field="a"), '{"a": [1, 2], "b": 3}', ([1, 2],)),
        (Match(field="a.b"), '{"a": {"b": null}}', (None,)),
        (Match(field="a.c"), '{"a": {"b": null}}', None),
        (Match(field="a"), "no JSON", None),
        (Match(field="a"), '"text"', None),
    ],
)
def test_what_is_compared(match: Match, text: str, part: Any) -> None:
    assert match.part(text) == part


def test_wrong_matches_are_refused() -> None:
    with pytest.raises(UserError, match="exclude each other"):
        Match("a", "b")
    with pytest.raises(UserError, match="no regular expression"):
        Match("(")


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ("..ab", ([0, 1], [2, 3])),
        (".a.bc.", ([0, 1, 2], [3, 4])),  # the last answer
        ("abcd", None),  # no prompt
        ("....", None),
    ],
)
def test_rows_are_split_at_their_last_answer(labels: str, expected: Any) -> None:
    ids = np.arange(len(labels), dtype=np.int32)
    marks = np.array([-100 if mark == "." else i for i, mark in enumerate(labels)], np.int32)
    assert split_row(Row(ids, marks, 0)) == expected


def test_answers_equal_what_generate_gives() -> None:
    model = wgpu_lora.load("demo")
    assert model.tokenizer
    texts = ["a", "Write a function that adds", "1 2 3"]
    prompts = [model.tokenizer.encode(text) for text in texts]
    answers = [answer.token_ids for answer in wgpu_lora.answer(model, texts, prompt_format="text", max_new_tokens=8)]

    def row(prompt: list[int], answer: list[int]) -> Row:
        ids = np.array([*prompt, *answer, *model.tokenizer.stop_ids], np.int32)[: len(prompt) + len(answer)]
        labels = ids.copy()
        labels[: len(prompt)] = -100
        return Row(ids, labels, 0)

    right = [row(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    result = compared(model, right)
    assert all(comparison.answer.startswith(comparison.reference) for comparison in result)
    starts = Match(pattern=r"^.{0,3}")
    assert all(comparison.matches for comparison in compared(model, right, match=starts))
    wrong = [row(prompt, answers[0][::-1]) for prompt in prompts]
    assert not any(comparison.matches for comparison in compared(model, wrong))
    with pytest.raises(UserError, match="finds nothing in the answer"):
        compared(model, right, match=Match(field="a"))


class Keys:
    def __init__(self, *keys: int) -> None:
        self.keys = np.array(keys, np.uint64)


def warnings(lines: list[dict[str, float]], samples: bool = False, held: Any = None, **state: Any) -> list[str]:
    return end_warnings(RunState(**state), lines, samples, Keys(1, 2, 3), held)  # type: ignore[arg-type]


def test_warnings_at_the_end() -> None:
    falls, rises = [{"loss": 13.0 - i} for i in range(12)], [{"loss": 3.0 + i} for i in range(12)]
    assert warnings(rises[:3]) == []  # three steps tell nothing
    assert warnings(falls) == []
    assert "training loss rose from 3.0000 to 14.0000" in warnings(rises)[0]
    held = {"first_eval_loss": 1.0, "last_eval_loss": 2.0, "best_eval_loss": 0.5, "best_step": 7}
    assert "best/, the adapter after step 7" in warnings(rises, **held)[0]
    assert warnings(rises, **held | {"last_eval_loss": 0.7}) == []  # held-out rows decide
    rewards = [{"loss": 1.0, "reward": value} for value in (0.9, *[0.5] * 9, 0.1)]
    assert "reward fell from 0.9000 to 0.1000" in warnings(rewards, True)[0]
    assert warnings(rises, True) == []
    assert "2 of 3 held-out rows are also trained on" in warnings(falls, held=Keys(2, 3, 4))[0]


def test_ends_of_a_log_are_means() -> None:
    assert first_and_last([{"reward": float(i)} for i in range(30)], "reward") == (1.0, 28.0)
    assert first_and_last([{"reward": 1.0}, {"loss": 2.0}], "reward") is None


def test_rewards_stand_for_the_loss(tmp_path: Path) -> None:
    lines = [{"step": i, "epoch": 0.1, "loss": 0.5, "reward": i / 10, "eval_reward": i / 20} for i in range(1, 10)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert losses(tmp_path, 0.5, None, None) == ["reward 0.1000 to 0.9000", "held-out reward 0.4500"]
    step = StepResult(1, 2, 0.5, 0.25, 1e-5, 1.0, 10, 1.0, None, metrics={"reward": 0.75, "entropy": 0.5})
    assert (step.facts(" "), step.progress) == ("reward 0.7500 entropy 0.5000 lr 1.00e-05", 0.75)
    assert Losses(REWARD, 0.5, 1.0, 0.75).improvement == 50
    assert Losses(HELD_OUT, 0.5, 0.25, 0.25).improvement == 50


def test_a_run_says_whether_it_worked(run: Run, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i} plus one: ", "completion": f"{i + 1}"} for i in range(4)]
    new = {"prompt": "9 plus one: ", "completion": "10"}
    data, held = tmp_path / "rows.jsonl", tmp_path / "held.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held.write_text("".join(json.dumps(row) + "\n" for row in [*rows[2:], new]))
    out = tmp_path / "out"
    assert "--answers must be 0 or more" in run("finetune", "--data", data, "--answers", -1).refusal()
    text = run("finetune", "--data", data, "--eval-data", held, "--output", out, "--max-steps", 2).output()
    assert "held-out token accuracy" in text
    assert "2 of 3 held-out rows are also trained on" in text
    assert "of 3 held-out rows, the greedy answer equals the row's own" in text
    assert text.count("expected ") == 3
    assert f"chat --adapter {out}" in text
    record = wgpu_lora.RunRecord.read(out)
    assert any("may be too few to learn much" in warning for warning in record.warnings)
    assert any("also trained on" in warning for warning in record.warnings)
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert all(0 <= line["mean_token_accuracy"] <= 1 for line in log if "loss" in line)
    result = wgpu_lora.evaluate("demo", held, adapter=out, match_pattern=r"\d+", run_log=False)
    share = sum(comparison.matches for comparison in result.comparisons) / 3
    assert result.metrics["exact_match"] == pytest.approx(share)
    assert result.metrics["mean_token_accuracy"] == pytest.approx(log[-1]["eval_mean_token_accuracy"])
