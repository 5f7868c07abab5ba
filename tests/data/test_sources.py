"""Files of rows: JSON arrays, CSV, Parquet, compressed files, and files of other kinds."""

from __future__ import annotations

import csv
import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data import chat
from support.sources import ROWS, ids_of, prepared, refused, written

from wgpu_lora.data import json_rows, python_source, training_data
from wgpu_lora.data.compressed_files import MIN_GROWN
from wgpu_lora.data.example_formats import EXAMPLES
from wgpu_lora.data.row_files import file_source
from wgpu_lora.data.source import BadRow
from wgpu_lora.errors import UserError
from wgpu_lora.infer import prompt_file

FORMATS = ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.jsonl.gz", "a.json.gz", "a.csv.gz", "a.data"]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    expected = prepared(python_source(ROWS))
    found = prepared(written(tmp_path / name))
    assert ids_of(found) == ids_of(expected)
    assert found.account.examples == 5
    assert found.digest != expected.digest  # of the bytes
    assert found.summary().startswith(f"{name}: 5 examples, 5 rows; ")


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
        found = list(json_rows.read_array(path))
    finally:
        json_rows._CHUNK = whole
    assert [row for _, row in found] == rows
    assert [place.number for place, _ in found] == list(range(1, len(rows) + 1))
    if indent:
        text = path.read_text(encoding="utf-8").split("\n")
        assert all(text[place.line - 1].startswith(" {") for place, _ in found)


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
    assert prepared(written(tmp_path / "b.json")).notes == ()


def test_an_element_that_is_too_long_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"text": "a"}, {"text": "' + b"a" * (60 << 20) + b'"}, {"text": "b"}]')
    tracemalloc.start()
    try:
        found = [row for _, row in json_rows.read_array(path)]
        assert tracemalloc.get_traced_memory()[1] < 56 << 20
    finally:
        tracemalloc.stop()
    assert found[::2] == [{"text": "a"}, {"text": "b"}]
    assert isinstance(found[1], BadRow)
    assert "longer than 16 MiB" in found[1].reason


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
    asked, said = chat("a", "b")[:1], chat("a", "b")[1:]
    cases = [(asked, said), (asked, "b"), ("a", said), (asked, ""), ("a", "b")]
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("prompt", "completion"), *([_cell(one) for one in pair] for pair in cases)])
    wanted = [{"prompt": asked, "completion": said}]
    wanted += [{"prompt": _cell(prompt), "completion": _cell(completion)} for prompt, completion in cases[1:]]
    assert [row for _, row in file_source(path).rows(EXAMPLES)] == wanted
    assert next(iter(file_source(path).rows(prompt_file.FORMATS)))[1]["prompt"] == asked


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
    path = written(tmp_path / "a.csv", [{"messages": json.dumps(rows[0]["messages"]), "tools": ""}])
    assert ids_of(prepared(path)) == ids_of(prepared(python_source(rows)))
    prompt, answer = chat("a", "b")
    rows = [{"prompt": [prompt], "completion": [answer]}, {"prompt": '["role"]', "completion": '[{"role": "x"'}]
    cells = [
        {key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()} for row in rows
    ]
    assert ids_of(prepared(written(path, cells))) == ids_of(prepared(python_source(rows)))
    path = written(tmp_path / "b.csv", [{"input_ids": "[1, 2, 3]", "labels": "[-100, 2, 3]"}])
    assert ids_of(prepared(path)) == [[1, 2, 3]]


# -- Parquet, compression, other files ---------------------------------------------------------------------------------


def test_null_fields_that_a_table_adds_are_none(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    said = [[*chat("a", "b")], [*chat("a"), {"role": "assistant", "content": "", "tool_calls": [call], "weight": 1}]]
    rows: list[dict[str, Any]] = [{"messages": messages, "text": None} for messages in said]
    rows.append({"messages": None, "text": "c"})
    expected = prepared(python_source(rows), template="thinking")
    assert ids_of(prepared(written(tmp_path / "a.parquet", rows), template="thinking")) == ids_of(expected)
    datasets = pytest.importorskip("datasets")
    assert ids_of(prepared(python_source(datasets.Dataset.from_list(rows)), template="thinking")) == ids_of(expected)


def test_parquet_that_is_damaged_or_lacks_columns(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet")
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:4] + b"\xff" * 40 + whole[44:], b"PAR1" * 5, b"no"):
        path.write_bytes(damaged)
        assert "cannot be read as Parquet (" in refused(path)
    assert "the columns are 'q', but the formats" in refused(written(tmp_path / "b.parquet", [{"q": "a"}]))
    assert "row 2: 'text' is null" in refused(written(tmp_path / "c.parquet", [{"text": "a"}, {"text": None}]))


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
