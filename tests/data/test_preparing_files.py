"""`data prepare`: what is read, and what it writes whatever happens."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data import write_jsonl
from support.preparing import ALIKE, ROWS, prepared, rows_of, run
from support.sources import written

from wgpu_lora.cli import main
from wgpu_lora.data.curation import Preparation, prepare_files
from wgpu_lora.errors import UserError


def test_folders_patterns_and_files(tmp_path: Path) -> None:
    place = tmp_path / "data"
    for i, name in enumerate(["b/x.jsonl", "a.csv", ".hidden.jsonl", "b/.git/x.jsonl", "c.jsonl.gz"]):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        written(place / name, ROWS[i : i + 1])
    (place / "notes.md").write_text("no rows")
    (place / "empty.jsonl").write_text("")
    (place / "blank.jsonl").write_text("\n\n")
    (place / "loop").symlink_to(place)
    (place / "pipe.jsonl").symlink_to(os.devnull)
    report = run(tmp_path, place, place / "a.csv", place / "b" / ".." / "a.csv")
    assert [Path(one["name"]).name for one in report["inputs"]] == [
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
    gz = written(tmp_path / "a.jsonl.gz", ROWS)
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
    path = write_jsonl(
        tmp_path / "data" / "in.jsonl" if (tmp_path / "data").mkdir() else tmp_path / "data/in.jsonl", *ROWS
    )
    names, out = [str(path)], tmp_path / "out"
    prepare_files(names, out)
    with pytest.raises(UserError, match="prepared already: give overwrite"):
        prepare_files(names, out)
    (out / "mine.txt").write_text("")
    with pytest.raises(UserError, match=r"holds other files \('mine.txt'\)"):
        prepare_files(names, out, Preparation(overwrite=True))
    with pytest.raises(UserError, match="holds other files"):
        prepare_files(names, tmp_path / "data", Preparation(overwrite=True))
    with pytest.raises(UserError, match="exists already"):
        prepare_files(names, path)
    (out / "mine.txt").unlink()
    with pytest.raises(UserError, match="which would be written"):
        prepare_files([str(out / "train.jsonl")], out, Preparation(overwrite=True))
    assert path.read_text() == "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "link").symlink_to(out)
    with pytest.raises(UserError, match="is a link"):
        prepare_files(names, tmp_path / "link", Preparation(overwrite=True))


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


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", *ROWS, ROWS[0], {"text": ""})
    command = ["data", "prepare", str(path), "--output", str(tmp_path / "out"), "--validation-split", "0.2"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "rows      52 in = 50 out + 1 rejected + 1 duplicates\n" in out
    assert "valid.jsonl: 10 rows\n" in out
    assert main(command) == 2
    assert capsys.readouterr().err == (
        f"wgpu-lora: {tmp_path / 'out'} has been prepared already: give --overwrite to replace it.\n"
    )
    assert main([*command, "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"]["out"] == 50
    assert main(["data", "prepare", str(path), "--output", str(tmp_path / "b"), "--validation-split", "2.5"]) == 2
    assert "--validation-split 2.5 is neither a share of the rows" in capsys.readouterr().err
