"""Preparations by `data prepare`, whose counts are checked, and what they wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.rows.data import write_jsonl
from wgpu_lora.data.curation import Preparation, prepare_files

ROWS: list[dict[str, Any]] = [{"prompt": f"What is {i}?", "completion": f"It is {i}.", "id": i} for i in range(50)]
ALIKE: list[dict[str, Any]] = [
    {"prompt": "A  caf\u00e9", "completion": "b", "id": 1},
    {"prompt": "A  caf\u00e9", "completion": "b", "id": 2},
    {"prompt": "a cafe\u0301", "completion": " B\n"},
    {"prompt": "a cafe", "completion": "b"},
]


def prepared(place: Path, *rows: Any, **options: Any) -> dict[str, Any]:
    """The report on rows of a file; `out` is the output."""
    write_jsonl(place / "in.jsonl", *rows)
    return run(place, place / "in.jsonl", **options)


def run(place: Path, *names: Path | str, **options: Any) -> dict[str, Any]:
    report = prepare_files([*map(str, names)], place / "out", Preparation(overwrite=True, **options))
    rows = report["rows"]
    lines = {path.name: len(path.read_bytes().splitlines()) for path in (place / "out").glob("*.jsonl")}
    assert lines == {name: file["rows"] for name, file in report["files"].items()}
    rejected = lines.pop("rejected.jsonl", 0)
    assert (rows["out"], rows["rejected"]) == (sum(lines.values()), rejected)
    assert rows["in"] == rows["out"] + rejected + rows["duplicates"]
    assert rows["in"] == sum(source["rows"] for source in report["inputs"])
    return report


def rows_of(place: Path, name: str = "train.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "out" / name).read_text(encoding="utf-8").splitlines()]


def reasons(place: Path) -> list[tuple[int, str]]:
    """(line, reason) of the rejected rows."""
    return [(row["line"], row["reason"]) for row in rows_of(place, "rejected.jsonl")]
