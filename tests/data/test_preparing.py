"""`data prepare`: which rows are kept, and as what."""

from __future__ import annotations

import datetime
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cli import Run
from support.rows.data import chat, write_jsonl
from support.rows.preparing import ALIKE, ROWS, prepared, reasons, rows_of, run
from support.rows.sources import write_source

from wgpu_lora.data.curation import Preparation, prepare_files
from wgpu_lora.data.curation.deduplication import normalize_text
from wgpu_lora.data.validation_split import validation_mask
from wgpu_lora.errors import UserError
from wgpu_lora.formats.tokenizer.reasoning import marker_in, without_thinking

# -- rows and their kinds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.jsonl.gz"])
def test_rows_of_every_format_keep_all_columns(tmp_path: Path, name: str) -> None:
    run(tmp_path, write_source(tmp_path / name, ROWS[:3]))
    rows = rows_of(tmp_path)
    assert [{**row, "id": int(row["id"])} for row in rows] == ROWS[:3]


def test_kinds_are_kept_apart(tmp_path: Path) -> None:
    pairs = [
        {"prompt": "a", "chosen": "b", "rejected": "c", "category": 1},
        {"chosen": chat("a", "b"), "rejected": chat("a", "c")},
        {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]},
    ]
    labelled = [{"prompt": "a", "completion": "b", "label": False}]
    report = prepared(tmp_path, ROWS[0], *pairs, *labelled, {"messages": chat("a", "b"), "chosen": None})
    assert rows_of(tmp_path, "preferences.jsonl") == pairs
    assert rows_of(tmp_path, "labelled.jsonl") == labelled
    assert [row["id"] if "id" in row else row["chosen"] for row in rows_of(tmp_path)] == [0, None]
    assert report["formats"]["chosen, rejected"] == 1


def test_files_that_may_give_pairs(tmp_path: Path) -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    paths = [write_jsonl(tmp_path / name, {**pair, "prompt": name}, ROWS[i]) for i, name in enumerate("ab")]
    run(tmp_path, *paths, preferences_from=["b"])
    assert [row["prompt"] for row in rows_of(tmp_path, "preferences.jsonl")] == ["b"]
    assert reasons(tmp_path) == [(1, "pairs are only taken from files that match 'b'.")]
    with pytest.raises(UserError, match="'x' matches none of the inputs"):
        run(tmp_path, *paths, preferences_from=["x"])


BAD: list[tuple[Any, str]] = [
    ('{"text": "a\udcff"}', "not valid UTF-8 (byte 12); save the file as UTF-8."),
    ('{"text": "\\ud800"}', "a \\u escape is a lone surrogate; write the character out."),
    ('{"text": "a\x00"}', "not JSON: invalid control character at character 12; each row must be one JSON object."),
    ("\x00\x00", "not JSON: expecting value at character 1; each row must be one JSON object."),
    ('{"text": "a", "text": "b"}', "the key 'text' is repeated in one object; keep one of the two."),
    ("[" * 100_000, "nested too deeply to read; a row needs only a few levels."),
    (
        '{"text": "a", "x": ' + "[" * 9000 + "]" * 9000 + "}",
        "nested too deeply to read; a row needs only a few levels.",
    ),
    ('{"text": "' + "a" * (16 << 20) + '"}', "longer than 16 MiB; split the row into several."),
    ("3", "it is a number, but each row must be one JSON object."),
    ('{"text": "  "}', "the answer is empty."),
    ('{"text": "a", "x": ' + "9" * 5000 + "}", "a number has too many digits; write it as text."),
    ('{"text": NaN}', "NaN is not valid JSON; use a number or null."),
    ('{"messages": [{"role": "user", "content": "a"}]}', "it has no answer to train on."),
    ('{"input_ids": [1, 2], "labels": [1, -100]}', "it has no answer to train on."),
    ('{"prompt": "a", "chosen": "b", "rejected": "b"}', "'chosen' and 'rejected' are equal, so there is nothing to"),
    ('{"tekst": "a"}', "the row fits no format: its keys are 'tekst', but the formats need "),
]


def test_rows_that_cannot_be_used_are_rejected(tmp_path: Path) -> None:
    lines = ['\ufeff{"text": "first"}', *(line for line, _ in BAD), "", '{"text": "last"}']
    path = tmp_path / "in.jsonl"
    path.write_bytes("\r\n".join(lines).encode("utf-8", "surrogateescape"))
    report = run(tmp_path, path)
    assert [row["text"] for row in rows_of(tmp_path)] == ["first", "last"]
    assert report["rows"] == {"in": len(BAD) + 2, "out": 2, "rejected": len(BAD), "duplicates": 0}
    for (line, reason), (number, (_, words)) in zip(reasons(tmp_path), enumerate(BAD, start=2), strict=True):
        assert line == number
        assert reason.startswith(words)
    files = [row["file"] for row in rows_of(tmp_path, "rejected.jsonl")]
    assert set(files) == {str(path)}


def test_reasons_are_counted_without_the_details_that_differ(tmp_path: Path) -> None:
    rows = [{"text": "a" * length} for length in (11, 12)]
    single = prepared(tmp_path, {"text": "a"}, rows[0], max_characters=10)
    assert single["reasons"] == {"it has 11 characters, more than 10; split it.": 1}
    report = prepared(tmp_path, {"text": "a"}, *rows, max_characters=10)
    assert report["reasons"] == {"it has N characters, more than N; split it.": 2}
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n{"text": "bb\xff"}')
    non_utf8 = run(tmp_path, tmp_path / "x.jsonl")
    assert non_utf8["reasons"] == {"not valid UTF-8 (byte N); save the file as UTF-8.": 2}


def test_values_that_json_lacks(tmp_path: Path) -> None:
    rows = [{"text": "a", "when": datetime.date(2026, 1, 2), "image": b"\xff", "score": float("nan")}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    report = run(tmp_path, tmp_path / "a.parquet")
    assert rows_of(tmp_path) == [{"text": "a", "when": "2026-01-02", "score": None}]
    assert report["dropped_columns"] == {"image": 1}


# -- duplicates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "indices", "removed"),
    [("normalized", [0, 3], (1, 1)), ("exact", [0, 2, 3], (1, 0)), ("keep", range(4), (0, 0))],
)
def test_duplicates_across_files(tmp_path: Path, mode: str, indices: list[int], removed: tuple[int, int]) -> None:
    paths = [write_jsonl(tmp_path / f"{i}.jsonl", row) for i, row in enumerate(ALIKE)]
    report = run(tmp_path, *paths, duplicates=mode)
    assert rows_of(tmp_path) == [ALIKE[i] for i in indices]
    assert report["duplicates"] == {"exact": removed[0], "normalized": removed[1], "near": 0}
    if mode != "keep":
        assert report["duplicates_shown"][0]["of"] == {"file": str(paths[0]), "number": 1}


def test_duplicates_in_different_formats(tmp_path: Path) -> None:
    same = [
        {"messages": chat("a", "b", system="s")},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
        {"prompt": chat("a", system="s"), "completion": chat("", "b")[1:]},
        {"instruction": "a", "output": "b", "system": "s"},
    ]
    other = [{"messages": chat("a", "b")}, {"prompt": "a", "completion": "b"}, {"prompt": "ab", "completion": ""}]
    untrained = {"messages": [*chat("a", "b", "c", "d")]}
    weighed = {"messages": [*chat("a", "b", "c"), {"role": "assistant", "content": "d", "weight": 0}]}
    report = prepared(tmp_path, *same, *other[:2], untrained, weighed)
    assert report["duplicates"]["exact"] == 3
    assert rows_of(tmp_path) == [same[0], *other[:2], untrained, weighed]


def test_normalising() -> None:
    assert normalize_text(" Stra\u00dfe\u00a0 \u0130\n") == normalize_text("STRASSE i\u0307")
    assert normalize_text("a b") != normalize_text("ab")


def test_near_duplicates(tmp_path: Path) -> None:
    pytest.importorskip("rensa")
    words = [f"word{i}" for i in range(200)]
    near = [*words[:100], "other", *words[101:]]
    far = [word if i % 5 else "other" for i, word in enumerate(words)]
    rows = [{"text": " ".join(text)} for text in (words, near, far)]
    report = prepared(tmp_path, *rows, near_duplicates=0.8)
    assert rows_of(tmp_path) == [rows[0], rows[2]]
    [shown] = report["duplicates_shown"]
    assert shown["kind"] == "near"
    assert shown["similarity"] == pytest.approx(1 - 6 / 201, abs=0.05)
    for wrong in (0.1, 1.1, float("nan")):
        with pytest.raises(UserError, match="must be a similarity from"):
            Preparation(near_duplicates=wrong)


def test_near_duplicates_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rensa", None)
    with pytest.raises(UserError, match=r"near_duplicates needs rensa: .*\[dedupe\]"):
        prepared(tmp_path, *ROWS, near_duplicates=0.8)
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl"]


# -- edits -------------------------------------------------------------------------------------------------------------


def test_system_messages_are_dropped(tmp_path: Path) -> None:
    developer = [{"role": "developer", "content": "d"}]
    rows = [
        {"messages": chat("a", "b", system="s")},
        {"conversations": [{"from": who, "value": who} for who in ("system", "human", "gpt")]},
        {"prompt": developer + chat("e"), "completion": chat("", "f")[1:]},
        {"instruction": "g", "output": "h", "system": "s"},
        {"prompt": chat(system="s"), "completion": chat("", "f")[1:]},
    ]  # fmt: skip
    report = prepared(tmp_path, *rows, strip_system=True)
    assert not any("system" in json.dumps(row) or "developer" in json.dumps(row) for row in rows_of(tmp_path))
    assert report["edited"] == {"system messages": 4}
    assert [line for line, _ in reasons(tmp_path)] == [5]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think>b", "b"),
        ("a</think>\n\nb", "b"),
        ("◁think▷a◁/think▷b", "b"),
        ("< think >a</ think\n>b", "b"),
        ("b <Thinking>a</Thinking> c", "b  c"),
        ("<think>a<think>b</think>c</think>d", "d"),
        ("[THINK]a[/THINK]b", "b"),
        ("<|START_THINKING|>a<|END_THINKING|>b", "b"),
        (" a < b ", " a < b "),
        ("<think></think>", ""),
        ("<think>a", None),
        ("<think>a</think>b</think>c", None),
    ],
)
def test_reasoning_is_dropped_from_a_text(text: str, expected: str | None) -> None:
    if expected is None:
        with pytest.raises(UserError, match="reasoning"):
            without_thinking(text)
    else:
        assert without_thinking(text) == expected
        assert marker_in(expected) is None


def test_reasoning_is_dropped_from_answers_only(tmp_path: Path) -> None:
    thought = "<think>x</think>b"
    rows = [
        {"messages": chat("what is <think>?", thought)},
        {"messages": [*chat("c"), {"role": "assistant", "content": "d", "reasoning_content": "x"}]},
        {"prompt": "e", "chosen": thought, "rejected": "c"},
        {"instruction": "<think>f", "output": thought},
        {"messages": chat("g", "<think>x")},
        {"messages": [*chat("h"), {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"},
                                                                     {"type": "text", "text": "i"}]}]},
    ]  # fmt: skip
    report = prepared(tmp_path, *rows, drop_thinking=True)
    assert report["edited"] == {"reasoning": 5}
    assert [row["messages"][-1] for row in rows_of(tmp_path) if "messages" in row] == [
        {"role": "assistant", "content": text} for text in "bdi"
    ]
    [(line, reason)] = reasons(tmp_path)
    assert (line, reason.partition(";")[0]) == (
        5, "an answer: its reasoning is not closed, so it is not known where the answer begins"
    )  # fmt: skip


def test_markers_are_checked_if_thinking_is_off(tmp_path: Path) -> None:
    thought = {"messages": chat("a", "<think>x</think>b")}
    field = {"messages": [*chat("c"), {"role": "assistant", "content": "d", "reasoning_content": "x"}]}
    rows = [
        thought,
        field,
        {"messages": chat("<think>", "b")},
        {**thought, "chat_template_kwargs": {"enable_thinking": True}},
    ]
    assert prepared(tmp_path, *rows)["rows"]["rejected"] == 0
    prepared(tmp_path, *rows, enable_thinking=False)
    assert reasons(tmp_path) == [
        (line, f"'{mark}' is left in trained text, but 'enable_thinking' is off; drop reasoning with drop_thinking.")
        for line, mark in ((1, "<think>"), (2, "reasoning_content"))
    ]
    prepared(tmp_path, {**thought, "chat_template_kwargs": {"enable_thinking": False}}, ROWS[0])
    assert [line for line, _ in reasons(tmp_path)] == [1]


# -- the split ---------------------------------------------------------------------------------------------------------


def test_rows_are_held_out(tmp_path: Path) -> None:
    for amount, seed in ((0.2, 42), (10, 42), (0.2, 1)):
        report = prepared(tmp_path, *ROWS, validation_split=amount, seed=seed)
        train, valid = rows_of(tmp_path), rows_of(tmp_path, "valid.jsonl")
        assert (len(train), len(valid)) == (40, 10)
        assert sorted([*train, *valid], key=lambda row: row["id"]) == ROWS
        assert list(report["files"]) == ["train.jsonl", "valid.jsonl"]
        prepared(tmp_path, *ROWS[::-1], validation_split=amount, seed=seed)
        assert {row["id"] for row in rows_of(tmp_path, "valid.jsonl")} == {row["id"] for row in valid}
        if seed == 42:
            first = valid
    assert valid != first


def test_groups_are_held_out_together(tmp_path: Path) -> None:
    rows = [{**row, "topic": row["id"] % 7} for row in ROWS] + [{"text": "no topic"}]
    report = prepared(tmp_path, *rows, validation_split=0.3, group_by="topic")
    train, valid = rows_of(tmp_path), rows_of(tmp_path, "valid.jsonl")
    assert not {row.get("topic") for row in valid} & {row.get("topic") for row in train}
    assert 14 <= len(valid) <= 15
    assert "1 row without 'topic': each is a group of its own" in report["notes"]
    for wrong, words in (
        ({"group_by": "tpoic"}, "No row has 'tpoic'"),
        ({"validation_split": 51}, "no rows to train on"),
    ):
        with pytest.raises(UserError, match=words):
            prepared(tmp_path, *rows, **{"validation_split": 0.3, **wrong})
    with pytest.raises(UserError, match="belong together"):
        prepared(tmp_path, *[{**row, "topic": 1} for row in ROWS], validation_split=0.3, group_by="topic")
    for amount in (0, -1, 1.5, float("nan"), float("inf")):
        with pytest.raises(UserError, match="neither a share"):
            Preparation(validation_split=amount)


@pytest.mark.parametrize("sizes", [[1] * 20, [3] * 5, [5, 1, 1, 1], [10, 9, 8], [2, 50, 3, 1, 1]])
def test_no_more_rows_than_asked_are_held_out(sizes: list[int]) -> None:
    keys = np.repeat(np.arange(len(sizes), dtype=np.uint64), sizes)
    for seed in range(20):
        for count in range(1, len(keys)):
            mask = validation_mask(keys, float(count), seed)
            assert len({*keys[mask]} & {*keys[~mask]}) == 0
            assert 0 < mask.sum() < len(keys)
            assert mask.sum() <= max(count, min(sizes))
            if min(sizes) == 1 == max(sizes):
                assert mask.sum() == count


# -- `data prepare` ----------------------------------------------------------------------------------------------------


def test_folders_patterns_and_files(tmp_path: Path) -> None:
    place = tmp_path / "data"
    for i, name in enumerate(["b/x.jsonl", "a.csv", ".hidden.jsonl", "b/.git/x.jsonl", "c.jsonl.gz"]):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        write_source(place / name, ROWS[i : i + 1])
    (place / "notes.md").write_text("no rows")
    (place / "empty.jsonl").write_text("")
    (place / "blank.jsonl").write_text("\n\n")
    (place / "loop").symlink_to(place)
    (place / "pipe.jsonl").symlink_to(os.devnull)
    report = run(tmp_path, place, place / "a.csv", place / "b" / ".." / "a.csv")
    assert [Path(source["name"]).name for source in report["inputs"]] == [
        "a.csv",
        "blank.jsonl",
        "c.jsonl.gz",
        "empty.jsonl",
        "x.jsonl",
    ]
    assert [int(row["id"]) for row in rows_of(tmp_path)] == [1, 4, 0]
    notes = "\n".join(report["notes"])
    for words in (
        "notes.md and pipe.jsonl",
        "is given more than once",
        "empty.jsonl has no rows",
        "blank.jsonl has no",
    ):
        assert words in notes
    for pattern, rows in (("**/*.jsonl", 1), ("**", 3), ("*", 3), ("[ab]*", 2), ("b", 1)):
        assert run(tmp_path, f"{place}/{pattern}", exclude=["notes*"])["rows"]["in"] == rows
    assert run(tmp_path, f"{place}/*", exclude=["c.*", "*/b/*"])["rows"]["in"] == 1
    for name, words in (
        ("nothing.jsonl", "does not exist"),
        ("*.nothing", "No file of rows matches"),
        ("", "is empty"),
    ):
        with pytest.raises(UserError, match=words):
            run(tmp_path, name if name in ("", "*.nothing") else tmp_path / name)


def test_damaged_files_are_refused_as_a_whole(tmp_path: Path) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", *ROWS)
    gz = write_source(tmp_path / "a.jsonl.gz", ROWS)
    gz.write_bytes(gz.read_bytes()[:-20])
    (tmp_path / "b.json").write_text('[{"text": "a"}, {"text": ')
    (tmp_path / "c.jsonl").write_bytes('{"text": "a"}'.encode("utf-16"))
    (tmp_path / "d.parquet").write_bytes(b"PAR1")
    for name in ("a.jsonl.gz", "b.json", "c.jsonl", "d.parquet"):
        with pytest.raises(UserError, match=name):
            run(tmp_path, good, tmp_path / name)
        assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_same_bytes_again(tmp_path: Path) -> None:
    rows = [*ROWS, *ALIKE, {"text": ""}]
    prepared(tmp_path, *rows, validation_split=0.1)
    first = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    prepared(tmp_path, *rows, validation_split=0.1)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == first


def test_what_exists_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    path = write_jsonl(tmp_path / "data" / "in.jsonl", *ROWS)
    names, out = [str(path)], tmp_path / "out"
    for place in (out, tmp_path / "other"):
        prepare_files(names, place)
    (tmp_path / "other" / "mine.txt").write_text("")
    (tmp_path / "link").symlink_to(out)
    for inputs, place, overwrite, words in (
        (names, out, False, "prepared already: give overwrite"),
        (names, tmp_path / "other", True, r"holds other files \('mine.txt'\)"),
        (names, tmp_path / "data", True, "holds other files"),
        (names, path, False, "exists already"),
        ([str(out / "train.jsonl")], out, True, "which would be written"),
        (names, tmp_path / "link", True, "is a link"),
    ):
        with pytest.raises(UserError, match=words):
            prepare_files(inputs, place, Preparation(overwrite=overwrite))
    assert path.read_text() == "".join(json.dumps(row) + "\n" for row in ROWS)


def test_output_in_the_folder_that_is_read(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", *ROWS)
    first = prepare_files([str(tmp_path)], tmp_path / "a")
    second = prepare_files([str(tmp_path)], tmp_path / "b")
    assert second["rows"] == first["rows"]
    assert any("was written by 'data prepare'" in note for note in second["notes"])
    again = prepare_files([str(tmp_path / "a")], tmp_path / "c")  # named, so it is read
    assert again["files"]["train.jsonl"] == first["files"]["train.jsonl"]


def test_nothing_is_left_of_an_interrupted_run(tmp_path: Path) -> None:
    path, before = write_jsonl(tmp_path / "in.jsonl", *ROWS), ["in.jsonl"]

    def interrupt(progress: Any) -> None:
        assert sorted(os.listdir(tmp_path)) != before
        raise KeyboardInterrupt

    for out in (tmp_path / "out", tmp_path / "deep" / "out"):
        with pytest.raises(KeyboardInterrupt):
            prepare_files([str(path)], out, watch=interrupt)
        assert os.listdir(tmp_path) == before
    with pytest.raises(UserError, match="No row is left, of 1 row; nothing was written"):
        prepared(tmp_path, {"text": ""})
    assert os.listdir(tmp_path) == before


NAMES = ["messages", "conversations", "prompt", "completion", "chosen", "rejected", "text", "label", "system", "output",
         "instruction", "input_ids", "labels", "prompt_ids", "tools", "chat_template_kwargs"]  # fmt: skip
ODD = st.sampled_from(["", "a", "<think>", "[1]", '[{"role": 1}]', None, True, 2, -1.5, [], {}, [[]], {"a": {}}])
PARTS = st.sampled_from(["role", "from", "content", "value", "type", "text", "thinking", "tool_calls", "weight"])
ROLES = st.sampled_from(["user", "assistant", "system", "gpt", "text", "thinking"])
MESSAGE = st.dictionaries(PARTS, ODD | ROLES | st.lists(st.dictionaries(PARTS, ODD | ROLES, max_size=3), max_size=2))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.dictionaries(st.sampled_from(NAMES), ODD | st.lists(MESSAGE | ODD, max_size=3)), max_size=30))
def test_any_rows_are_accounted_for(rows: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as place:
        options = {"strip_system": True, "drop_thinking": True, "enable_thinking": False, "validation_split": 1}
        prepared(Path(place), *rows, *ROWS[:2], **options)


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, run: Run) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", *ROWS, ROWS[0], {"text": ""})
    command = ["data", "prepare", str(path), "--output", str(tmp_path / "out"), "--validation-split", "0.2"]
    out = run(*command).output()
    assert "rows      52 in = 50 out + 1 rejected + 1 duplicates\n" in out
    assert "valid.jsonl: 10 rows\n" in out
    assert run(*command).refusal() == (
        f"wgpu-lora: {tmp_path / 'out'} has been prepared already: give --overwrite to replace it."
    )
    assert json.loads(run(*command, "--overwrite", "--json").output())["rows"]["out"] == 50
    assert (
        "--validation-split 2.5 is neither a share of the rows"
        in run("data", "prepare", str(path), "--output", str(tmp_path / "b"), "--validation-split", "2.5").refusal()
    )
