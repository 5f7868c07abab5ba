"""Rows with empty answers, repeated rows and bad rows: dropped, counted, reported or set aside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from support.cli import QWEN2, ROWS, SMALL, Run, flags, write_rows
from support.rows.data import chat, small_tokenizer, write_jsonl
from support.rows.sources import prepared, refused, write_source

import wgpu_lora
from wgpu_lora.api.multi_adapter import MultiAdapterPipeline
from wgpu_lora.data import skipped_rows, tokenize_source
from wgpu_lora.data.row_counts import SKIPPED
from wgpu_lora.data.row_files import file_source

# -- empty answers, repeated and bad rows ------------------------------------------------------------------------------

EMPTY = [
    {"messages": chat("a", " \n")},
    {"prompt": "a", "completion": ""},
    {"instruction": "a", "output": "\t"},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": ""}]},
    {"text": "  "},
    {"prompt": chat("a", "b"), "completion": [{"role": "assistant", "content": [{"type": "text", "text": ""}]}]},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": []}]},
]


@pytest.mark.parametrize("completion_only_loss", [True, False])
def test_empty_answers_are_left_out(tmp_path: Path, completion_only_loss: bool) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    good = [{"messages": [*chat("a"), call]}, {"prompt": "", "completion": "b"}, {"text": "c"}]
    path = write_jsonl(tmp_path / "a.jsonl", *EMPTY, *good)
    data = prepared(path, completion_only_loss=completion_only_loss, template="thinking", max_length=99)
    assert [row.index for row in data.rows] == [7, 8, 9]
    assert data.summary().startswith(
        "a.jsonl: 10 examples, 3 rows, 7 skipped for an empty answer (lines 1, 2, 3, ...); "
    )
    write_jsonl(path, *EMPTY[:2])
    assert "to train on: of 2 rows, 2 with an empty answer; give rows that have answers." in refused(path)


@pytest.mark.parametrize("template", ["chatml", "chatml_marked", "thinking"])
def test_one_empty_answer_of_several_is_not_learnt(tmp_path: Path, template: str) -> None:
    turns = chat("a", "", "c", "d")
    path = write_jsonl(tmp_path / "a.jsonl", {"messages": turns})
    data = tokenize_source(path, small_tokenizer(template), max_length=64)
    assert "1 empty turn not trained on (line 1);" in data.summary()
    turns[1]["weight"] = 0
    silent = tokenize_source(write_jsonl(path, {"messages": turns}), small_tokenizer(template), max_length=64)
    assert [row.labels.tolist() for row in data.rows] == [row.labels.tolist() for row in silent.rows]
    assert "empty" not in silent.summary()
    whole = {"completion_only_loss": False}  # then the empty one would be learnt with the rest
    del turns[1]["weight"]
    write_jsonl(path, {"messages": turns}, {"messages": chat("a", "b")})
    assert "1 row, 1 skipped for an empty answer (line 1); " in prepared(path, **whole).summary()


def test_repeated_rows_are_counted_and_kept(tmp_path: Path) -> None:
    row = {"prompt": "a", "completion": "b"}
    path = write_jsonl(tmp_path / "a.jsonl", row, {**row, "id": 1}, dict(reversed(row.items())), row)
    data = prepared(path)
    assert len(data.rows) == 4
    assert ", 4 rows, 2 repeat an earlier row (lines 3, 4); " in data.summary()


def test_bad_rows_are_told_together_or_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    bad = [
        '{"text": 1}',
        "{",
        '{"tekst": "\\u001b[31m"}',
        '{"messages": [{"role": "user"}]}',
        '{"input_ids": [1, 9999]}',
    ]
    lines = ['{"text": "a"}', *bad, '{"text": "b"}']
    path.write_text("\n".join(lines))
    message_lines = refused(path).split("\n  ")
    assert message_lines[0] == f"{path} has 5 rows that cannot be used; fix them, or skip them with skip_bad_rows:"
    assert [line.split(":")[0] for line in message_lines[1:]] == [f"line {i}" for i in range(2, 7)]
    path.write_text("\n".join([*lines, *['{"text": 2}'] * 200]))
    message_lines = refused(path).split("\n  ")
    assert "has 205 rows" in message_lines[0]
    assert message_lines[1].startswith("lines 2, 8, 9, 10, 11, 12: 'text' is a number")
    assert message_lines[-1] == "and 195 more"

    path.write_text("\n".join(lines))
    data = prepared(path, skip_bad_rows=True)
    assert [row.index for row in data.rows] == [0, 6]
    assert "7 examples, 2 rows, 5 bad rows skipped (lines 2, 3, 4, ...); " in data.summary()
    bad_rows = [json.loads(line) for line in (skipped_rows([data.account]) or b"").splitlines()]
    assert [row["line"] for row in bad_rows] == [2, 3, 4, 5, 6]
    reason = "'text' is a number, but must be a string."
    assert bad_rows[0] == {"data": str(path), "line": 2, "reason": reason, "content": {"text": 1}}
    assert bad_rows[1]["content"] == "{"
    assert skipped_rows([prepared(file_source(write_source(path)), skip_bad_rows=True).account]) is None
    path.write_text("no\n1")
    assert "of 2 rows, 2 that cannot be used (line 1: not JSON" in refused(path, skip_bad_rows=True)


# -- runs on rows from Python equal those on a file; bad rows are set aside; both resume -------------------------------

WEIGHTS = "adapter_model.safetensors"


def same(directory: Path, other: Path) -> bool:
    matrices, right = load_file(directory / WEIGHTS), load_file(other / WEIGHTS)
    return matrices.keys() == right.keys() and all((matrices[name] == right[name]).all() for name in matrices)


def test_rows_from_python_train_as_a_file_does(tmp_path: Path) -> None:
    file, rows = write_rows(tmp_path / "rows.jsonl"), ROWS
    model = wgpu_lora.load(QWEN2)

    def train(data: Any, name: str, **options: Any) -> wgpu_lora.RunRecord:
        return wgpu_lora.finetune(model, data=data, output=tmp_path / name, **{**SMALL, "save_steps": 1, **options})

    train(file, "file", eval_data=file)
    record = train(rows, "rows", eval_data=iter(rows))
    assert same(tmp_path / "file", tmp_path / "rows")
    assert record.data.path == record.eval_data.path == f"{len(rows)} rows from Python"
    assert record.options.data == "rows from Python"
    losses = [wgpu_lora.evaluate(model, data, max_length=16) for data in (file, rows)]
    assert losses[0].loss == losses[1].loss
    assert losses[1].data.startswith(f"rows from Python: {len(rows)} examples")

    (tmp_path / "rows" / "run.json").unlink()
    for extra in (tmp_path / "rows" / "checkpoints").glob("step-2"):
        extra.rename(tmp_path / "last")
    with pytest.raises(wgpu_lora.UserError, match=rf"The rows of {len(rows) - 1} rows from Python have changed since"):
        train(rows[1:], "rows", eval_data=rows, resume=True)
    train(file, "rows", eval_data=file, resume=True)
    assert same(tmp_path / "file", tmp_path / "rows")

    tasks = [{"data": rows, "checkpoint": tmp_path / "a"}, {"data": file, "checkpoint": tmp_path / "b"}]
    job = MultiAdapterPipeline(tasks, model, output=str(tmp_path / "both"), eval_data=rows, **SMALL).job
    digests = [run.stream.rows_digest() for run in job.runs]
    assert digests[0] == digests[1]
    assert [run.heldout.path for run in job.runs if run.heldout] == [f"{len(rows)} rows from Python"] * 2


def test_bad_rows_are_set_aside_in_the_output(tmp_path: Path, run: Run) -> None:
    file = write_rows(tmp_path / "rows.jsonl", ['{"input_ids": [1, "2"]}', *ROWS, "{}", "[1]"])
    command = ["finetune", *flags(model=QWEN2, data=file, output=tmp_path / "out", **SMALL | {"max_steps": 1})]
    code, _, err = run(*command)
    lines = err.splitlines()
    assert (code, len(lines)) == (2, 4)
    assert lines[0].startswith(f"wgpu-lora: {file} has 3 rows that cannot be used; fix them")
    assert lines[1].startswith("  line 1: 'input_ids' must be a list of integers")
    assert not (tmp_path / "out").exists()
    shown = run(*command, "--skip-bad-rows").output()
    assert "3 bad rows skipped (lines 1, " in shown
    assert f"bad rows will be listed in {tmp_path / 'out' / SKIPPED}" in shown
    aside = [json.loads(line) for line in (tmp_path / "out" / SKIPPED).read_text().splitlines()]
    assert [row["content"] for row in aside] == [{"input_ids": [1, "2"]}, {}, [1]]
    assert (
        "3 bad rows skipped"
        in run("evaluate", "--model", QWEN2, "--data", str(file), "--max-length", "16", "--skip-bad-rows").output()
    )
