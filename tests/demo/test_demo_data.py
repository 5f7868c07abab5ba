"""The demo's rows: held-out functions are unseen, and the checks accept the right answer and nothing less."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from scripts.demo import demo_rows, make_demo
from wgpu_lora.files.assets import DEMO_HELDOUT, DEMO_MODEL, DEMO_TRAIN
from wgpu_lora.train.checks.asserts import Outcome, parse_check
from wgpu_lora.train.checks.code_check import run_check
from wgpu_lora.train.checks.sandbox import plain_data


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


TRAIN, HELDOUT = read(DEMO_TRAIN), read(DEMO_HELDOUT)


def failure(code: str, check: str) -> str | None:
    """Why our own code does not pass, run in this process."""
    space: dict = {}
    exec(code, space)

    def outcome(name: str, args: str, kwargs: str) -> Outcome:
        return lambda: space[name](*plain_data.load(args), **plain_data.load(kwargs))

    reasons = [condition.judge([outcome(*call) for call in condition.calls]) for condition in parse_check(check)]
    return next(filter(None, reasons), None)


def test_rows_are_well_formed():
    assert len(TRAIN) >= 300
    assert len(HELDOUT) >= 50
    for row in TRAIN + HELDOUT:
        assert [turn["role"] for turn in row["messages"]] == ["user", "assistant"]
        assert f"{row['name']}(xs)" in row["messages"][0]["content"]
        assert row["check"].count("assert ") >= 5


def test_rows_are_what_the_generator_makes():
    splits = demo_rows.demo_rows(make_demo.SEED, make_demo.TRAIN_ROWS, make_demo.HELDOUT_ROWS)
    assert splits == (TRAIN, HELDOUT)


def test_reference_answers_pass_their_checks():
    for row in TRAIN + HELDOUT:
        assert failure(demo_rows.answer(row), row["check"]) is None


def test_reference_answers_pass_one_by_one():
    for row in HELDOUT[:5]:
        result = run_check(demo_rows.answer(row), row["check"], allow_unconfined=True)
        assert result.passed, result.reason


def test_checks_reject_wrong_functions():
    for row in HELDOUT:
        wrong = f"def {row['name']}(xs):\n    return None"
        assert "assertion failed" in str(failure(wrong, row["check"]))


def test_checks_reject_an_answer_that_forgets_a_step():
    for row in TRAIN + HELDOUT:
        lines = demo_rows.answer(row).split("\n")
        unfiltered = [*lines[:3], lines[4][4:], *lines[5:]]
        unmapped = [*lines[:4], "            out.append(x)", *lines[5:]]
        unreduced = [*lines[:5], "    return out"]
        for wrong in (unfiltered, unmapped, unreduced):
            assert "assertion failed" in str(failure("\n".join(wrong), row["check"]))


def test_no_heldout_function_in_the_training_rows():
    assert demo_rows.find_leaks(HELDOUT, map(demo_rows.answer, TRAIN)) == []
    trained = {tuple(row["steps"]) for row in TRAIN}
    assert not [row for row in HELDOUT if tuple(row["steps"]) in trained]


@pytest.mark.slow
@pytest.mark.rare
def test_no_heldout_function_in_the_pretraining_rows():
    assert demo_rows.find_leaks(HELDOUT, map(demo_rows.answer, make_demo.pretraining_rows())) == []


def test_every_operation_is_taught_by_the_training_rows():
    assert {step for row in HELDOUT for step in row["steps"]} <= {step for row in TRAIN for step in row["steps"]}


def test_leak_check_sees_through_names_and_numbers():
    row = {"messages": [{"role": "assistant", "content": "def f(xs):\n    return [x + 1 for x in xs]"}]}
    renamed = "class A:\n    def other(self_list: list) -> list:\n        return [q + 7 for q in self_list]"
    assert demo_rows.find_leaks([row], [renamed])
    assert not demo_rows.find_leaks([row], ["def f(xs):\n    return [x * 1 for x in xs]", "not python at all"])


def test_model_folder_is_whole_and_small():
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    names |= {"chat_template.jinja", "training.json", "README.md"}
    files = {path.name: path for path in DEMO_MODEL.iterdir()}
    assert names <= set(files)
    assert sum(path.stat().st_size for path in files.values()) < 10_000_000
    config = json.loads(files["config.json"].read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(files["tokenizer.json"]))
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert tokenizer.token_to_id("<|im_end|>") == config["eos_token_id"]


def test_prompts_of_reinforcement_learning_are_not_held_out() -> None:
    rows = demo_rows.prompt_rows(0, 500, HELDOUT)
    assert len({json.dumps(row["messages"]) for row in rows}) > 490
    assert demo_rows.find_leaks(HELDOUT, map(demo_rows.answer, rows)) == []
    assert not {tuple(row["steps"]) for row in rows} & {tuple(row["steps"]) for row in HELDOUT}
    for row in rows[:20]:
        assert failure(demo_rows.answer(row), row["check"]) is None
