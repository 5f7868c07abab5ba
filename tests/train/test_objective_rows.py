"""An objective declares the rows that it reads, and they are read from every kind of file, dataset and list."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data import chat
from support.preferences import Labelled, Preferences
from support.sources import ids_of, prepared, refused, written

from wgpu_lora.cli import main
from wgpu_lora.data import Source, TokenizedData, python_source, training_data
from wgpu_lora.errors import UserError
from wgpu_lora.train.objectives import OBJECTIVES, formats_of
from wgpu_lora.train.objectives.objective import Objective
from wgpu_lora.train.objectives.sft import SFT

FILES = ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.jsonl.gz"]
TEXTS: list[dict[str, Any]] = [
    {"prompt": f"[{i}] is", "chosen": f"a, {i}", "rejected": "b", "weight": i + 0.5, "id": i} for i in range(3)
]
CHATS: list[dict[str, Any]] = [
    {"prompt": chat("a", system="s"), "chosen": chat("", "b")[1:], "rejected": chat("", f"c {i}")[1:]} for i in range(2)
]
LABELS: list[dict[str, Any]] = [{"prompt": "a", "completion": "b", "label": good} for good in (True, False, True)]


def read(data: Source | Path, objective: Objective, **options: Any) -> TokenizedData:
    return prepared(data, formats=formats_of(objective), parts=objective.parts, **options)


def refusal(data: Source | Path, objective: Objective) -> str:
    return refused(data, formats=formats_of(objective), parts=objective.parts)


def in_cells(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("objective", "rows"), [(Preferences(), TEXTS), (Preferences(), CHATS), (Labelled(), LABELS)],
    ids=["texts", "chats", "labels"],
)  # fmt: skip
def test_rows_are_the_same_in_every_file(tmp_path: Path, name: str, objective: Objective, rows: list[Any]) -> None:
    expected = read(python_source(rows), objective)
    found = read(written(tmp_path / name, in_cells(rows) if name.endswith("sv") else rows), objective)
    assert ids_of(found) == ids_of(expected)
    assert found.values == expected.values
    assert len(found.samples) == len(rows)


def test_values_of_rows() -> None:
    assert read(python_source(TEXTS), Preferences()).values == (0.5, 1.5, 2.5)
    assert read(python_source(CHATS), Preferences()).values == ()  # all 1
    assert read(python_source(LABELS), Labelled()).values == (1.0, -1.0, 1.0)


def test_rows_of_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(CHATS).save_to_disk(tmp_path / "saved")
    datasets.Dataset.from_list(TEXTS).remove_columns("rejected").save_to_disk(tmp_path / "half")
    expected = ids_of(read(python_source(CHATS), Preferences()))
    assert ids_of(read(training_data(tmp_path / "saved")[0], Preferences())) == expected
    assert ids_of(read(python_source(datasets.Dataset.from_list(CHATS)), Preferences())) == expected
    lacking = refusal(training_data(tmp_path / "half")[0], Preferences())
    assert lacking.startswith(f"{tmp_path / 'half'}: the columns are 'prompt', 'chosen', 'weight', 'id', but the form")


PAIRWISE = ("dpo", "orpo", "cpo")
NEEDED = "but the formats need prompt_ids, chosen_ids, rejected_ids and weight; prompt, chosen and rejected"


@pytest.mark.parametrize("name", FILES)
def test_what_is_missing_is_named_with_the_formats(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, [{"question": "a", "completion": "b", "label": "true"}])
    named = "'question', 'completion', 'label', but the format needs prompt, completion and label"
    assert f"{named}; rename 'question' to 'prompt'." in refusal(path, Labelled())
    path = written(path, [{"question": "a", "chosen": "b", "rejected": "c"}])
    readers = " or ".join(f"objective='{name}'" for name in PAIRWISE)
    assert f"'chosen', 'rejected', {NEEDED}; use {readers} for such rows." in refusal(path, Preferences())
    one = refusal(written(path, [{"prompt": "a", "label": "true"}]), Labelled())
    assert "'prompt', 'label', but the format needs prompt, completion and label." in one.replace("; rename them", "")


def test_bad_rows_are_told_together_or_skipped(tmp_path: Path) -> None:
    bad = [
        ({"chosen": [{"role": "bot"}], "prompt": chat("a")}, "'chosen[0]' has the role 'bot'"),
        ({"rejected": None}, "'prompt' is a string and 'rejected' null, but both must be strings or both lists"),
        ({"weight": "high"}, "'weight' is 'high', but must be a finite number."),
        ({"weight": 1e39}, "'weight' is 1e+39, but must be a finite number."),
        ({"chosen": chat("", "b")[1:]}, "'prompt' is a string and 'chosen' a list, but both"),
    ]
    path = written(tmp_path / "a.jsonl", [TEXTS[0], *[{**TEXTS[1], **wrong} for wrong, _ in bad], TEXTS[2]])
    told = refusal(path, Preferences()).split("\n  ")
    assert told[0] == f"{path} has 5 rows that cannot be used; fix them, or skip them with skip_bad_rows:"
    for line, (number, (_, words)) in zip(told[1:], enumerate(bad, start=2), strict=True):
        assert line.startswith(f"line {number}: {words}")
    found = read(path, Preferences(), skip_bad_rows=True)
    assert ids_of(found) == ids_of(read(python_source([TEXTS[0], TEXTS[2]]), Preferences()))
    assert found.values == (0.5, 2.5)
    path = written(tmp_path / "a.csv", [{**LABELS[0], "label": label} for label in ("1", "False", "", "maybe")])
    assert "line 5: 'label' is 'maybe', but must be true or false." in refusal(path, Labelled())
    assert read(path, Labelled(), skip_bad_rows=True).values == (1.0, -1.0)


NAMES = sorted({*Preferences.formats.columns, *Labelled.formats.columns})
ODD = st.sampled_from(["", "a", "1", "nan", "TRUE", "[1]", '[{"role": 1}]', None, True, 2, -1.5, 10**5000, [], {}])
LISTS = st.lists(ODD | st.just({"role": "user", "content": "a"}), max_size=2)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(NAMES), ODD | LISTS), st.sampled_from([Preferences(), Labelled()]))
def test_any_object_is_a_sample_or_a_user_error(row: dict[str, Any], objective: Objective) -> None:
    with contextlib.suppress(UserError):
        sample = formats_of(objective).read(row)
        assert len(sample.examples) == objective.parts
        assert np.isfinite(np.float32(sample.value))


@pytest.fixture
def registered() -> Iterator[None]:
    OBJECTIVES.update({"preferences": Preferences, "labelled": Labelled})
    yield
    del OBJECTIVES["preferences"], OBJECTIVES["labelled"]


def test_rows_of_another_objective(tmp_path: Path, registered: None, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the objectives that read them, as the caller would give the option."""
    path = written(tmp_path / "a.parquet", TEXTS)
    readers = [*PAIRWISE, "preferences"]
    said = " or ".join(f"objective='{name}'" for name in readers)
    assert f"; use {said} for such rows." in refusal(path, SFT())
    others = "objective='sft' or objective='kto' or objective='labelled'"
    assert f"; use {others} for such rows." in refusal(python_source(LABELS), Preferences())
    path = written(tmp_path / "a.csv", TEXTS)
    assert main(["plan", "--model", "tests/fixtures/models/qwen2", "--data", str(path)]) == 2
    said = " or ".join(f"--objective {name}" for name in readers)
    assert f"; use {said} for such rows." in capsys.readouterr().err
