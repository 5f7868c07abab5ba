"""What the tests of reports share."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.training.shared_runs import edit_json
from support.web.pages import Page


def profile_of(run: Path, **work: Any) -> dict[str, Any]:
    """A profile.json of the run's own model, but for what `work` says."""
    facts = json.loads((run / "run.json").read_text())
    own = {"model": "qwen2", "base_digest": facts["base_digest"], "base_dtype": "nf4", "layers": 2, "whole": True}
    own |= {"batch": 2, "tokens": 16, "rank": 4, "gradient_checkpointing": False, "compute_dtype": "f32"}
    own |= {"target_modules": "all-linear"}
    kernels = [{"kernel": name, "seconds": 0.25} for name in ("nf4_matmul", "<adamw>", "nf4_matmul")]
    return {"work": own | work, "device": {"name": "zork", "driver": "1.0"}, "kernels": kernels}


def copied(runs: Path, place: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """A copy of the second run, with some facts changed by group."""
    shutil.copytree(runs / "second", place)
    facts = json.loads((place / "run.json").read_text())
    changed = {group: facts[group] | values for group, values in (changes or {}).items()}
    edit_json(place / "run.json", **changed)
    return place


def page_of(output: Path) -> Page:
    return Page((output / "report.html").read_text())
