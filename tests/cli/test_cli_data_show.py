"""data show, and models that are asked as they were trained."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support.cli import Run
from support.models import words_model
from support.rows.data import chat, write_jsonl

from wgpu_lora.data import UNTRAINED, parse_example, tokenize_example
from wgpu_lora.formats.tokenizer import chat_template
from wgpu_lora.formats.tokenizer.examples import Alpaca, Completion
from wgpu_lora.infer import answers as answering
from wgpu_lora.infer.prompts import chat_prompt, trained_prompt_format
from wgpu_lora.models.model_files import read_model

CHATML = "{% for m in messages %}{{ m.role }} {{ m.content }} . {% endfor %}"
CHATML += "{% if add_generation_prompt %}assistant {% endif %}"
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}


def test_rows_are_shown_as_the_model_gets_them(run: Run, tmp_path: Path) -> None:
    model = words_model(tmp_path / "m", CHATML)
    rows = [
        {"messages": chat("w1", "w2 w3")},
        {"messages": [*chat("w1"), {"role": "assistant", "content": "", "tool_calls": [CALL]}]},
        {"messages": [*chat("w1"), {"role": "assistant", "content": "w2", "reasoning_content": "w9"}]},
        {"prompt": "w1", "completion": ""},
        "no row",
    ]
    data = write_jsonl(tmp_path / "a.jsonl", *rows)
    show = ("data", "show", "--model", model, "--data", data)
    out = run(*show, "--json", *(f"--row={n}" for n in range(1, 6))).output()
    first, call, reasoning, empty, broken = json.loads(out)
    tokens = first["rows"][0]["tokens"]
    [(ids, labels)] = tokenize_example(parse_example(rows[0]), read_model(model).tokenizer)
    assert [(token["id"], token["trained"]) for token in tokens] == list(
        zip(ids, [label != UNTRAINED for label in labels], strict=True)
    )
    trained = [segment["text"] for segment in first["rows"][0]["segments"] if segment["trained"]]
    assert ["w2 w3" in text for text in trained] == [True]
    assert first["refused"] is None
    assert "does not render 'tool_calls' of message 1" in call["refused"]
    assert call["rows"] == []
    assert "the chat template leaves out 'reasoning_content' of 1 row" in reasoning["notes"]
    assert "1 with an empty answer" in empty["refused"]
    assert broken["refused"].startswith("it is a string")
    out = run(*show, "--row", 1).output()
    assert out.startswith(f"model     the tokenizer and the chat template of {model}\nline 1\n")
    assert f"{len(tokens)} tokens, " in out
    ids = " ".join(str(token["id"]) for token in tokens if token["trained"])
    assert f"\n          {ids}\n" in out, "ids stand beside the text"
    _, out, _ = run(*show, "--row", 1, "--tokens")
    assert sum(line.startswith(("context", "trained")) for line in out.splitlines()) == len(tokens)
    refusal = run(*show, "--row", 9).refusal()
    assert refusal == f"wgpu-lora: {data} has fewer than 9 rows: give a smaller number for --row."


def test_pairs_show_both_answers(run: Run, tmp_path: Path) -> None:
    model = words_model(tmp_path / "m", CHATML)
    data = write_jsonl(tmp_path / "a.jsonl", {"prompt": "w1", "chosen": "w2", "rejected": "w3"})
    code, out, _ = run("data", "show", "--model", model, "--data", data, "--objective", "dpo")
    assert (code, out.count("chosen "), out.count("rejected ")) == (0, 1, 1)


@pytest.mark.parametrize(
    ("template_source", "rows", "expected"),
    [
        (None, [{"instruction": "w1", "input": "", "output": "w2"}], "alpaca"),
        (CHATML, [{"instruction": "w1", "input": "", "output": "w2"}], "chat"),
        (CHATML, [{"prompt": "w1", "completion": "w2"}], "text"),
        (CHATML, [{"messages": chat("w1", "w2")}], "chat"),
        (CHATML, [{"messages": chat("w1", "w2")}, {"prompt": "w1", "completion": "w2"}], None),
    ],
)
def test_models_are_asked_as_they_were_trained(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    template_source: str | None,
    rows: list[Any],
    expected: str | None,
) -> None:
    model = words_model(tmp_path / "m", template_source)
    data, adapter = write_jsonl(tmp_path / "a.jsonl", *rows), tmp_path / "out"
    to = ("--output", adapter)
    run("finetune", "--model", model, "--data", data, "--max-steps", 2, "--save-steps", 1, *to).output()
    assert trained_prompt_format([adapter]) == expected
    assert trained_prompt_format([path.parent for path in adapter.rglob("metadata.json")]) == expected
    tokenizer = read_model(model).tokenizer
    prompts: list[list[int]] = []

    def record(*arguments: Any, **more: Any) -> list[int]:
        prompts.append(chat_prompt(*arguments, **more))
        return prompts[-1]

    monkeypatch.setattr(answering, "chat_prompt", record)
    more = ("--model", model, "--adapter", adapter, "--max-new-tokens", 1)
    code, _, err = run("generate", "--prompt", "w1", *more)
    assert code == 0, err
    as_row = {"alpaca": Alpaca("w1", "", "", ""), "text": Completion("w1", "")}.get(str(expected), "w1")
    assert prompts.pop() == chat_prompt(tokenizer, as_row)
    assert (f"--prompt-format {expected}" in err) is (expected in ("alpaca", "text"))
    (tmp_path / "prompts.jsonl").write_text(json.dumps(rows[0]) + "\n")
    run("generate", "--prompts", tmp_path / "prompts.jsonl", *more).output()
    same = Alpaca("w1", "", "", "") if "instruction" in rows[0] else as_row if expected else "w1"
    assert prompts.pop() == chat_prompt(tokenizer, same)
    code, _, err = run("generate", "--prompt", "w1", "--prompt-format", "text", *more)
    assert (code, prompts.pop()) == (0, tokenizer.opened(tokenizer.encode("w1")))


def test_what_a_row_of_training_is_asked_with_is_what_it_is_trained_with(tmp_path: Path) -> None:
    tokenizer = read_model(words_model(tmp_path / "m")).tokenizer
    for row in ({"instruction": "w1", "input": "w2", "output": "w3"}, {"instruction": "w1", "output": "w3"}):
        [(ids, labels)] = tokenize_example(parse_example(row), tokenizer)
        prompt = chat_prompt(tokenizer, Alpaca(row["instruction"], row.get("input", ""), "", ""))
        assert prompt == ids[: labels.count(UNTRAINED)]


def test_an_alpaca_prompt_has_its_wording_also_beside_a_template(tmp_path: Path) -> None:
    tokenizer = read_model(words_model(tmp_path / "m", CHATML)).tokenizer
    plain = read_model(words_model(tmp_path / "n")).tokenizer
    assert chat_prompt(tokenizer, "w1", None, "alpaca") == chat_prompt(plain, Alpaca("w1", "", "", ""))


DATED = "{{ strftime_now('%d %b %Y %H:%M:%S') }}" + CHATML


def test_a_run_and_its_teacher_cache_keep_the_date_of_the_template(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = (
        words_model(tmp_path / "m", DATED),
        write_jsonl(tmp_path / "a.jsonl", *[{"messages": chat("w1", "w2")}] * 3),
    )
    base = ("finetune", "--model", model, "--data", data)
    assert run(*base, "--max-steps", 2, "--output", tmp_path / "two")[0] == 0
    assert run("teacher-cache", "--model", model, "--data", data, "--output", tmp_path / "cache")[0] == 0

    class Tomorrow(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return super().now(tz) + timedelta(days=1)

    monkeypatch.setattr(chat_template, "datetime", Tomorrow)
    run("finetune", "--resume", "--max-steps", 4, "--output", tmp_path / "two").output()
    run(
        *base, "--objective", "kd", "--teacher-cache", tmp_path / "cache", "--max-steps", 1, "--output", tmp_path / "kd"
    ).output()
    assert (
        "3 of 3 rows are finished"
        in run("teacher-cache", "--model", model, "--data", data, "--output", tmp_path / "cache").output()
    )
    adapters = [word for name in ("p1", "p2") for word in ("--adapters", f"{data}:{tmp_path / name}")]
    run("finetune", "--model", model, *adapters, "--output", tmp_path / "pipe", "--max-steps", 2).output()
    monkeypatch.undo()
    run("finetune", "--resume", "--max-steps", 3, "--output", tmp_path / "pipe").output()


def test_a_template_date_is_checked(run: Run, tmp_path: Path) -> None:
    assert (
        "--template-date yesterday is not a date in ISO format"
        in run("finetune", "--template-date", "yesterday", "--output", tmp_path / "a").refusal()
    )
