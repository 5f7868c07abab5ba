"""Files of rows: JSON arrays, CSV, Parquet, compressed files, and files of other kinds."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ROOT
from support.rows.data import chat
from support.rows.hostile import memory_below
from support.rows.sources import ROWS, ids_of, prepared, refused, write_source

from wgpu_lora.data import heldout_data, json_rows, python_source, training_data
from wgpu_lora.data.compressed_files import MIN_GROWN
from wgpu_lora.data.example_formats import EXAMPLES
from wgpu_lora.data.huggingface import is_hub_id
from wgpu_lora.data.row_files import file_source
from wgpu_lora.data.source import BadRow
from wgpu_lora.errors import UserError
from wgpu_lora.infer import prompt_file

FORMATS = ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.jsonl.gz", "a.json.gz", "a.csv.gz", "a.data"]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    expected = prepared(python_source(ROWS))
    data = prepared(write_source(tmp_path / name))
    assert ids_of(data) == ids_of(expected)
    assert data.account.examples == 5
    assert data.digest != expected.digest  # of the bytes
    assert data.summary().startswith(f"{name}: 5 examples, 5 rows; ")


# -- JSON arrays -------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.sampled_from(["\\", '"', "]", "{,", '\\"']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(rows=st.lists(st.dictionaries(st.text(max_size=4), JSON, max_size=3), min_size=1, max_size=5),
       indent=st.sampled_from([None, 1]), chunk=st.integers(1, 9))  # fmt: skip
def test_arrays_are_read_as_json_reads_them(tmp_path_factory, rows, indent, chunk) -> None:
    path = tmp_path_factory.getbasetemp() / "array.json"
    path.write_text(json.dumps(rows, indent=indent, ensure_ascii=bool(indent)), encoding="utf-8")
    whole = json_rows._CHUNK
    json_rows._CHUNK = chunk
    try:
        elements = list(json_rows.read_array(path))
    finally:
        json_rows._CHUNK = whole
    assert [row for _, row in elements] == rows
    assert [place.number for place, _ in elements] == list(range(1, len(rows) + 1))
    if indent:
        text = path.read_text(encoding="utf-8").split("\n")
        assert all(text[place.line - 1].startswith(" {") for place, _ in elements)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "is an empty list"),
        ('[{"text": "a"},\n{"text": "b}]', r"is not closed: row 2, line 2, lacks"),
        ('[{"text": "a"}', "is not closed: row 1, line 1"),
        ('[{"text": "a"}]\n\n[{"text": "b"}]', "text after the end of its list, in line 3"),
        ('[{"text": "a"}\n}]', "line 2: there is one closing brace too many"),
        ('[{"text": "a"},\n\n {"text": 1}]', r"row 2 \(line 3\): 'text' is a number"),
        ('[{"text": "a"}, {"text": \'b\'}]', r"row 2: not JSON: expecting value at character 10"),
        ('[{"text": "a"},]', r"row 2: there is nothing between two commas, or after the last"),
        ('[{"text": "a"}, ["b"]]', r"row 2: it is a list"),
        ('{"data": [{"text": "a"}]}', r"line 1: .*list 'data': write only that list"),
        ('{\n"version": 1,\n"rows": [{"text": "a"}]}', "one JSON object over several lines; .*list 'rows'"),
        ('{\n"text": "a"\n}', "one JSON object over several lines; put it into a list"),
        ('{\n"text": "a"\n}\n{\n"text": "b"\n}', "objects over several lines; write one per line"),
        ('{"text": ["a", "b"]}', "'text' is a list, but must be a string; it has columns, not rows"),
        ('{"prompt": ["a"], "completion": ["b"]}', "has columns, not rows"),
        ('{"text": "a\x01b"}', "not JSON: invalid control character at character 12;"),
    ],
)
@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_json_that_is_not_rows(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        prepared(path)


def test_an_array_in_a_jsonl_file_is_said_to_be_read_as_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ROWS))
    assert prepared(path).notes == ("a.jsonl is a JSON array, whose elements are read as rows",)
    assert prepared(write_source(tmp_path / "b.json")).notes == ()


def test_an_element_that_is_too_long_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"text": "a"}, {"text": "' + b"a" * (60 << 20) + b'"}, {"text": "b"}]')
    with memory_below(56 << 20):
        elements = [row for _, row in json_rows.read_array(path)]
    assert elements[::2] == [{"text": "a"}, {"text": "b"}]
    assert isinstance(elements[1], BadRow)
    assert "longer than 16 MiB" in elements[1].reason


# -- CSV ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        b"\xef\xbb\xbfinstruction,input,output\r\na,,b\r\n",
        b"instruction;output;input\na;b;\n\n",
        b"\tinstruction\toutput\n0\ta\tb\n",
        b' "instruction", output\n"a",b\n',
        b'instruction,output,"a, note"\n"a","b","x;y;\nz"\n',
        b"instruction,output,tools,messages\na,b,,",
    ],
)
def test_tables(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(text.removeprefix(b" "))
    assert ids_of(prepared(path)) == ids_of(prepared(python_source([{"instruction": "a", "output": "b"}])))


def test_cells_are_messages_all_or_none(tmp_path: Path) -> None:
    prompts, completions = chat("a", "b")[:1], chat("a", "b")[1:]
    cases = [(prompts, completions), (prompts, "b"), ("a", completions), (prompts, ""), ("a", "b")]
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("prompt", "completion"), *([_cell(cell) for cell in pair] for pair in cases)])
    expected = [{"prompt": prompts, "completion": completions}]
    expected += [{"prompt": _cell(prompt), "completion": _cell(completion)} for prompt, completion in cases[1:]]
    assert [row for _, row in file_source(path).rows(EXAMPLES)] == expected
    assert next(iter(file_source(path).rows(prompt_file.FORMATS)))[1]["prompt"] == prompts


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "is empty: add a line with the column names"),
        (b"text\n", "is empty"),
        (
            b"What is 1?,2\na,b\n",
            r"line 1: the first line must have the column names: the columns are 'What is 1\?', '2',",
        ),
        (b"Prompt,Completion\na,b\n", r"but .*; rename 'Prompt' to 'prompt' and 'Completion' to 'completion'\."),
        (b"Question;Answer\na;b\n", r"; rename 'Question' to 'prompt' and 'Answer' to 'completion'\."),
        (b"sep=;\r\nprompt;completion\r\na\r\n", "line 3: it has 1 cell, but"),
        (b"text,text\na,b\n", "two columns are named 'text'"),
        (b'prompt,completion\na,b\n\n"a\nc",b\na,b,c\n', "line 6: it has 3 cells, but the header names 2 columns"),
        (b"prompt,completion\na\n", "line 2: it has 1 cell, but"),
        (b"text\nb\na\xffb\n", "line 3: not valid UTF-8"),
        (b'text\n"a"b\n', "line 2: not CSV: ',' expected after '\"'"),
        (b'text\nc\n"a\nb\n' + b"c\n" * 9, "line 3: a quotation mark is not closed"),
        (b'text\n"' + (b"c" * 999 + b"\n") * 18_000, "line 2: a quotation mark is not closed, or .* 16 MiB"),
        (b"text\rb\r", "line 1: a line ends with a lone carriage return"),
        ("text\na\n".encode("utf-16"), "is text in UTF-16; save it as UTF-8"),
        (b"messages\n\"[{'role': 'user'}]\"\n", "line 2: 'messages' is a string that is not valid JSON"),
    ],
)
def test_tables_that_are_wrong(tmp_path: Path, text: bytes, words: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(text)
    with pytest.raises(UserError, match=words):
        prepared(path)


def test_lists_in_cells(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"messages": chat("a", "b"), "tools": None}]
    path = write_source(tmp_path / "a.csv", [{"messages": json.dumps(rows[0]["messages"]), "tools": ""}])
    assert ids_of(prepared(path)) == ids_of(prepared(python_source(rows)))
    prompt, answer = chat("a", "b")
    rows = [{"prompt": [prompt], "completion": [answer]}, {"prompt": '["role"]', "completion": '[{"role": "x"'}]
    cells = [
        {key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()} for row in rows
    ]
    assert ids_of(prepared(write_source(path, cells))) == ids_of(prepared(python_source(rows)))
    path = write_source(tmp_path / "b.csv", [{"input_ids": "[1, 2, 3]", "labels": "[-100, 2, 3]"}])
    assert ids_of(prepared(path)) == [[1, 2, 3]]


# -- Parquet, compression, other files ---------------------------------------------------------------------------------


def test_null_fields_that_a_table_adds_are_none(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    chats = [[*chat("a", "b")], [*chat("a"), {"role": "assistant", "content": "", "tool_calls": [call], "weight": 1}]]
    rows: list[dict[str, Any]] = [{"messages": messages, "text": None} for messages in chats]
    rows.append({"messages": None, "text": "c"})
    expected = prepared(python_source(rows), template="thinking")
    assert ids_of(prepared(write_source(tmp_path / "a.parquet", rows), template="thinking")) == ids_of(expected)
    datasets = pytest.importorskip("datasets")
    assert ids_of(prepared(python_source(datasets.Dataset.from_list(rows)), template="thinking")) == ids_of(expected)


def test_parquet_that_is_damaged_or_lacks_columns(tmp_path: Path) -> None:
    path = write_source(tmp_path / "a.parquet")
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:4] + b"\xff" * 40 + whole[44:], b"PAR1" * 5, b"no"):
        path.write_bytes(damaged)
        assert "cannot be read as Parquet (" in refused(path)
    assert "the columns are 'q', but the formats" in refused(write_source(tmp_path / "b.parquet", [{"q": "a"}]))
    assert "row 2: 'text' is null" in refused(write_source(tmp_path / "c.parquet", [{"text": "a"}, {"text": None}]))


@pytest.mark.parametrize("module", ["pyarrow", "datasets"])
def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(UserError, match=r"pip.* install .*\[data\]"):
        prepared(path) if module == "pyarrow" else training_data("some-one/some-rows")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"PK\x03\x04...", "zip archive or an Excel workbook"),
        (b"\x28\xb5\x2f\xfd...", "zstd"),
        (b"Once upon a time", "is not a supported file of rows"),
        (gzip.compress(b'{"text": "a"}\n' * 9, mtime=0)[:-9], "cannot be decompressed"),
        (gzip.compress(b" " * (MIN_GROWN + 9), mtime=0), "expands to more than 200 times its size"),
    ],
)
def test_files_of_other_kinds(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "a.data"
    path.write_bytes(data)
    with pytest.raises(UserError, match=words):
        prepared(path)


# -- what is found at a path, in a Hugging Face dataset, and in rows from Python ---------------------------------------

# -- what is found -----------------------------------------------------------------------------------------------------


def training_files(data: Path | str, *arguments: Any, **options: Any) -> tuple[str, str | None, tuple[str, ...]]:
    source, heldout = training_data(data, *arguments, **options)
    return source.name, heldout and heldout.name, source.notes


def test_files_beside_the_training_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no train\.jsonl .*it holds no data"):
        training_data(tmp_path)
    write_source(tmp_path / "mine.csv")
    with pytest.raises(UserError, match=r"it holds mine\.csv: name the file itself"):
        training_data(tmp_path)
    train = write_source(tmp_path / "train.jsonl")
    assert training_files(train) == training_files(tmp_path) == ("train.jsonl", None, ())
    write_source(tmp_path / "test.csv")
    unused = "{} beside train.jsonl {} not used; use eval_data for held-out rows"
    assert training_files(tmp_path) == ("train.jsonl", None, (unused.format("test.csv", "is"),))
    for name in ("dev.jsonl", "val.parquet", "val.json", "validation.jsonl", "train.csv"):
        write_source(tmp_path / name)
    expected = unused.format("train.csv, val.parquet, val.json, dev.jsonl and test.csv", "are")
    source, heldout, notes = training_files(tmp_path)
    assert (source, heldout) == ("train.jsonl", "validation.jsonl")
    assert set(notes[0].replace(" and ", ", ").split(", ")) == set(expected.replace(" and ", ", ").split(", "))
    assert training_files(train)[1] is None
    assert "validation.jsonl" in training_files(train)[2][0]
    assert training_files(tmp_path, train) == ("train.jsonl", "train.jsonl", ())
    assert training_files(tmp_path, eval_split="test") == ("train.jsonl", "test.csv", ())
    assert training_files(tmp_path, split="test") == ("test.csv", None, ())
    assert heldout_data(tmp_path).name == "validation.jsonl"
    assert heldout_data(tmp_path, "test").name == "test.csv"
    with pytest.raises(UserError, match=r"has no split 'nope': choose one of"):
        training_data(tmp_path, split="nope")
    with pytest.raises(UserError, match="is a file: leave it out"):
        training_data(train, split="train")


@pytest.mark.parametrize(
    ("data", "hub"),
    [("tatsu-lab/alpaca", True), ("owner/name.v1.5", True), ("data/tain.jsonl", False), ("a/b.csv.gz", False),
     ("./a/b", False), ("../a", False), ("/a/b", False), ("~/a", False), ("a/b/c", False), ("alpaca", False),
     ("tests/tain", False), ("ö/b", False), ("a\\b", False), ("a/b c", False)],
)  # fmt: skip
def test_a_mistyped_path_is_no_data_set(data: str, hub: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert is_hub_id(data) is hub
    if not hub:
        with pytest.raises(UserError, match="There is no data at"):
            training_data(data)


class Hub:
    """Stands in for `datasets`, and returns a dataset or raises an error."""

    def __init__(self, answer: Any):
        self.answer, self.requests = answer, []
        self.disable_progress_bars = lambda: None

    def load_dataset(self, name: str, config: str | None, split: str | None) -> Any:
        self.requests.append((name, config, split))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer if split is None else self.answer["train"]


def test_data_sets_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{**row, "id": i} for i, row in enumerate(ROWS)]
    table = datasets.Dataset.from_list(rows)
    hub = Hub({"train": table, "validation": table.select([0]), "test": table})
    monkeypatch.setitem(__import__("sys").modules, "datasets", hub)
    source, heldout = training_data("some-one/some-rows")
    assert ids_of(prepared(source)) == ids_of(prepared(python_source(ROWS)))
    assert prepared(source).digest == prepared(python_source([dict(reversed(row.items())) for row in rows])).digest
    assert (source.path, heldout.path) == ("some-one/some-rows (train)", "some-one/some-rows (validation)")
    assert source.notes[0].startswith("some-one/some-rows (test) beside some-one/some-rows (train) is not used")
    train_source, nothing = training_data("some-one/some-rows", split="train[:9]", dataset_config="main")
    assert (train_source.name, nothing, hub.requests[-1]) == (
        "some-one/some-rows (train[:9])",
        None,
        ("some-one/some-rows", "main", "train[:9]"),
    )
    hub.answer = {"all": table.rename_column("prompt", "question")}
    source, _ = training_data("some-one/some-rows")
    assert "some-one/some-rows (all): the columns are 'question', 'completion', 'id', but" in refused(source)
    hub.answer = {"a": table, "b": table}
    with pytest.raises(UserError, match="has no split 'train', only a and b: choose one with split"):
        training_data("some-one/some-rows")
    with pytest.raises(UserError, match=r"give them again, as data=\[\.\.\.\]"):
        training_data("rows from Python")
    for error, words in (
        (ConnectionError("Couldn't reach 'x' on the Hub (OfflineModeIsEnabled)"), "HF_HUB_OFFLINE is set"),
        (ConnectionError("Couldn't reach 'x' on the Hub (LocalEntryNotFoundError)"), "cannot be reached"),
        (type("DatasetNotFoundError", (FileNotFoundError,), {})("x"), "neither a local file or folder nor a dataset"),
        (ValueError("Config name is missing: ['a']\nExample of usage:\nx"), r"\['a'\]\): choose a .*dataset_config"),
        (ValueError('Unknown split "b". Should be one of [\'a\'].'), r"\['a'\]\): choose one of these with split"),
        (RuntimeError("odd\nthings"), r"cannot be read \(odd things\)"),
    ):  # fmt: skip
        hub.answer = error
        with pytest.raises(UserError, match=words) as raised:
            training_data("some-one/some-rows")
        assert "\n" not in str(raised.value)


def test_folders_of_data_sets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    splits = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:2])}
    datasets.disable_progress_bars()
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "both")
    splits["train"].save_to_disk(tmp_path / "one")
    source, heldout = training_data(tmp_path / "both")
    assert heldout is None
    assert "(test)" in source.notes[0]
    expected = ids_of(prepared(python_source(ROWS)))
    assert ids_of(prepared(source)) == ids_of(prepared(training_data(tmp_path / "one")[0])) == expected
    assert len(ids_of(prepared(heldout_data(tmp_path / "both")))) == 2
    with pytest.raises(UserError, match="has no split 'valid'"):
        heldout_data(tmp_path / "both", "valid")
    arrow = next((tmp_path / "one").glob("*.arrow"))
    whole = arrow.read_bytes()
    arrow.write_bytes(whole[:200] + b"\xff" * 200 + whole[400:])
    with pytest.raises(UserError, match="cannot be read"):
        prepared(training_data(tmp_path / "one")[0])


# -- rows from Python --------------------------------------------------------------------------------------------------


def test_rows_from_python() -> None:
    import numpy as np

    expected = prepared(python_source(ROWS))
    again = prepared(python_source(row for row in ROWS))
    assert (ids_of(again), again.digest, again.path) == (ids_of(expected), expected.digest, "5 rows from Python")
    assert prepared(python_source(ROWS[:4])).digest != expected.digest
    tokens = [{"input_ids": np.arange(4), "labels": (-100, np.int64(1), 2, 3)}]
    assert ids_of(prepared(python_source(tokens))) == [[0, 1, 2, 3]]
    assert prepared(python_source(tokens)).summary().startswith("rows from Python: 1 example, 1 row; ")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "'data' has no rows: give"),
        (iter([]), "an iterator can be read only once"),
        ([{"text": "a"}, {"text": "b"}, "c"], "^row 3 of data: it is a string, but a row must be a dict"),
        ([{"text": "a"}, {"tekst": "b"}], "^row 2 of data: the row fits no format: its keys are 'tekst'"),
        ([{"text": "\ud800"}], "^row 1 of data: a text has a lone surrogate"),
        ([{1: "a"}], "a key is not a string"),
        ([{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": float("nan")}], "'completion' is NaN"),
    ],
)  # fmt: skip
def test_rows_from_python_that_are_wrong(data: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        prepared(python_source(data))


def test_what_are_no_rows() -> None:
    assert refused(python_source([{"a": 1}] * 12)).startswith("'data' has 12 rows that cannot be used; ")
    loop: list[Any] = []
    loop.append(loop)
    assert "nested too deeply" in refused(python_source([{"messages": loop}]))
    frame = SimpleNamespace(to_dict=None, columns=["text"])
    splits = {"train": SimpleNamespace(column_names=["text"])}
    for value, words in ((3, "not a number"), ({"text": ["a"]}, "not one dict"), (b"a", "not bytes"), (print, "not "),
                         (frame, r"to_dict\(.records.\)"), (splits, "choose one of its splits, train")):  # fmt: skip
        with pytest.raises(UserError, match=f"'eval_data' must be a path, or rows: .*{words}"):
            python_source(value, "eval_data")
