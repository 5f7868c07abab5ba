"""The demo on a published model: its rows, and the check of its answers."""

from __future__ import annotations

import json

import pytest

from scripts.demo import order_rows
from wgpu_lora.demo.before_and_after import Orders, heldout_rows, request_of
from wgpu_lora.files.assets import ORDERS_HELDOUT, ORDERS_TRAIN

TRAIN, HELDOUT = heldout_rows(ORDERS_TRAIN), heldout_rows(ORDERS_HELDOUT)
ANSWER = '{"name": "Alex", "item": "tin cans", "color": "gold", "count": 3}'
ROW = {"messages": [{"role": "assistant", "content": ANSWER}]}


def test_rows_are_what_the_script_makes() -> None:
    assert order_rows.order_rows(order_rows.TRAIN, order_rows.SEED, 200) == TRAIN
    assert order_rows.order_rows(order_rows.HELDOUT, order_rows.SEED + 1, 60) == HELDOUT


def test_no_value_is_in_both_files() -> None:
    def words(rows: list[dict]) -> set[str]:
        fields = [json.loads(row["messages"][-1]["content"]) for row in rows]
        return {word for order in fields for value in order.values() for word in str(value).split()}

    assert not words(TRAIN) & words(HELDOUT)
    assert not set(order_rows.TRAIN.wordings.splitlines()) & set(order_rows.HELDOUT.wordings.splitlines())


def test_every_value_is_in_the_sentence() -> None:
    for row in TRAIN + HELDOUT:
        for value in json.loads(row["messages"][-1]["content"]).values():
            assert str(value) in request_of(row)


def test_reference_answers_pass() -> None:
    task = Orders()
    assert len(task.rows) == 60
    for row in task.rows:
        assert task.check(row["messages"][-1]["content"], row).passed


@pytest.mark.parametrize("around", ["{}", "\n {}\n", "```json\n{}\n```", "Here you are: {}"])
def test_form_does_not_count(around: str) -> None:
    pretty = json.dumps(dict(reversed(json.loads(ANSWER).items())), indent=2)
    assert Orders().check(around.replace("{}", pretty), ROW).passed


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (ANSWER.replace("3", '"3"'), 'count is "3", not 3'),
        (ANSWER.replace("Alex", "Al").replace("3", "30"), 'name is "Al", not "Alex"; count is 30, not 3'),
        (ANSWER.replace('"color": "gold", ', ""), "color is missing"),
        (ANSWER.replace("}", ', "price": 1}'), "price was not asked for"),
        (f"{ANSWER}\n{ANSWER}", "not a JSON object"),
        ("[" * 5000, "not a JSON object"),
        ('{"a":' * 5000 + "}", "not a JSON object"),
        (ANSWER[:-1], "not a JSON object"),
        ("", "not a JSON object"),
    ],
)
def test_wrong_answers(answer: str, reason: str) -> None:
    checked = Orders().check(answer, ROW)
    assert not checked.passed
    assert checked.reason == reason
