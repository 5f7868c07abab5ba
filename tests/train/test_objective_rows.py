"""An objective declares the rows that it reads, and they are read from every kind of file, dataset and list."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.preferences import Labelled, Preferences
from support.sources import refused, written

from wgpu_lora.cli import main
from wgpu_lora.data import Source, python_source
from wgpu_lora.train.objectives import OBJECTIVES, formats_of
from wgpu_lora.train.objectives.objective import Objective
from wgpu_lora.train.objectives.sft import SFT

FILES = ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.jsonl.gz"]
TEXTS: list[dict[str, Any]] = [
    {"prompt": f"[{i}] is", "chosen": f"a, {i}", "rejected": "b", "weight": i + 0.5, "id": i} for i in range(3)
]
LABELS: list[dict[str, Any]] = [{"prompt": "a", "completion": "b", "label": good} for good in (True, False, True)]


def refusal(data: Source | Path, objective: Objective) -> str:
    return refused(data, formats=formats_of(objective), parts=objective.parts)


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
