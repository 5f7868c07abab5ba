"""What is found at a path, in a Hugging Face dataset, and in rows from Python."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import ROOT
from support.sources import ROWS, ids_of, prepared, refused, written

from wgpu_lora.data import heldout_data, python_source, training_data
from wgpu_lora.data.huggingface import is_hub_id
from wgpu_lora.errors import UserError

# -- what is found -----------------------------------------------------------------------------------------------------


def found(data: Path | str, *arguments: Any, **options: Any) -> tuple[str, str | None, tuple[str, ...]]:
    source, heldout = training_data(data, *arguments, **options)
    return source.name, heldout and heldout.name, source.notes


def test_files_beside_the_training_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no train\.jsonl .*it holds no data"):
        training_data(tmp_path)
    written(tmp_path / "mine.csv")
    with pytest.raises(UserError, match=r"it holds mine\.csv: name the file itself"):
        training_data(tmp_path)
    train = written(tmp_path / "train.jsonl")
    assert found(train) == found(tmp_path) == ("train.jsonl", None, ())
    written(tmp_path / "test.csv")
    unused = "{} beside train.jsonl {} not used; use eval_data for held-out rows"
    assert found(tmp_path) == ("train.jsonl", None, (unused.format("test.csv", "is"),))
    for name in ("dev.jsonl", "val.parquet", "val.json", "validation.jsonl", "train.csv"):
        written(tmp_path / name)
    expected = unused.format("train.csv, val.parquet, val.json, dev.jsonl and test.csv", "are")
    source, heldout, notes = found(tmp_path)
    assert (source, heldout) == ("train.jsonl", "validation.jsonl")
    assert set(notes[0].replace(" and ", ", ").split(", ")) == set(expected.replace(" and ", ", ").split(", "))
    assert found(train)[1] is None
    assert "validation.jsonl" in found(train)[2][0]
    assert found(tmp_path, train) == ("train.jsonl", "train.jsonl", ())
    assert found(tmp_path, eval_split="test") == ("train.jsonl", "test.csv", ())
    assert found(tmp_path, split="test") == ("test.csv", None, ())
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
        self.answer, self.asked = answer, []
        self.disable_progress_bars = lambda: None

    def load_dataset(self, name: str, config: str | None, split: str | None) -> Any:
        self.asked.append((name, config, split))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer if split is None else self.answer["train"]


def test_data_sets_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([{**row, "picture": b"x"} for row in ROWS])
    hub = Hub({"train": table, "validation": table.select([0]), "test": table})
    monkeypatch.setitem(__import__("sys").modules, "datasets", hub)
    source, heldout = training_data("some-one/some-rows")
    assert ids_of(prepared(source)) == ids_of(prepared(python_source(ROWS)))
    assert prepared(source).digest == prepared(python_source([dict(reversed(row.items())) for row in ROWS])).digest
    assert heldout
    assert (source.path, heldout.path) == ("some-one/some-rows (train)", "some-one/some-rows (validation)")
    assert source.notes[0].startswith("some-one/some-rows (test) beside some-one/some-rows (train) is not used")
    one, nothing = training_data("some-one/some-rows", split="train[:9]", dataset_config="main")
    assert (one.name, nothing, hub.asked[-1]) == (
        "some-one/some-rows (train[:9])",
        None,
        ("some-one/some-rows", "main", "train[:9]"),
    )
    hub.answer = {"all": table.rename_column("prompt", "question")}
    source, _ = training_data("some-one/some-rows")
    assert "some-one/some-rows (all): the columns are 'question', 'completion', 'picture', but" in refused(source)
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
        ([{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": float("nan")}], "'completion' NaN"),
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
