"""docs/tutorial.md does what it says: its commands, as written, in one shell."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from support import ROOT

TUTORIAL = ROOT / "docs" / "tutorial.md"


@pytest.mark.rare
def test_every_command_works(tmp_path: Path) -> None:
    script = "\n".join(re.findall(r"^```sh\n(.*?)^```$", TUTORIAL.read_text(), re.DOTALL | re.MULTILINE))
    assert script.count("wgpu-lora ") >= 8
    environment = {name: value for name, value in os.environ.items() if name != "WGPU_LORA_NO_TUNE"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=ROOT,
        env=environment | {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    before, _, after = done.stdout.partition("finished ")
    asked = {"double_even": "x * 2 for x in xs if x % 2 == 0", "add_numbers": "x + 1 for x in xs if x > 3"}
    for name, value in asked.items():
        answer = f"def {name}(xs: list[int]) -> list[int]:\n    return [{value}]"
        assert answer not in before
        assert answer in after
    place = tmp_path / "house-style"
    assert len((place / "train.jsonl").read_text().splitlines()) == 50
    state = json.loads((place / "house-style" / "run.json").read_text())["state"]
    assert state["step"] == 150
    assert state["first_eval_loss"] > 5
    assert state["last_eval_loss"] < 0.4
    answers = [json.loads(line) for line in (place / "answers.jsonl").read_text().splitlines()]
    assert sum(row["response"] == row["messages"][-1]["content"] for row in answers) > 5
    for name in ("report/report.html", "house-style.gguf", "house-style/README.md", "house-style/tokenizer.json"):
        assert (place / name).stat().st_size > 1000, name
