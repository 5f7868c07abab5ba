"""proof.json and proof.html."""

from __future__ import annotations

import json
import math
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from wgpu_lora.assets import ROOT
from wgpu_lora.atomic import write_bytes_atomic
from wgpu_lora.pages import render as render_page
from wgpu_lora.pages.chart import Chart, Line, line_chart
from wgpu_lora.proof.context import Proof
from wgpu_lora.proof.finding import Result

SCHEMA = 1
JSON, PAGE = "proof.json", "proof.html"
PACKAGES = ("wgpu-lora", "wgpu", "numpy", "safetensors", "tokenizers", "jinja2", "psutil")


def write_report(result: Result, proof: Proof) -> None:
    """Writes both files into the proof's directory."""
    facts = plain(gather_facts(result, proof))
    write_bytes_atomic(proof.out / JSON, (json.dumps(facts, indent=1, allow_nan=False) + "\n").encode())
    write_bytes_atomic(proof.out / PAGE, render(facts).encode())


def gather_facts(result: Result, proof: Proof) -> dict[str, Any]:
    checks = [check.as_dict() for check in result.checks]
    devices = proof.known()
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "proven": result.proven,
        "outcome": result.outcome,
        "verdict": result.verdict,
        "seconds": round(sum(check["seconds"] for check in checks), 2),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "wgpu_native": devices.get("wgpu_native"),
        "platform": platform.platform(),
        "commit": commit(),
        "command": sys.argv,
        "recipe": {"path": str(proof.recipe), "options": proof.args.as_dict()},
        "devices": devices.get("devices", []),
        "used": devices.get("used", []),
        "used_on": result.devices,
        "require_discrete": proof.discrete,
        "checks": checks,
    }


def commit() -> str | None:
    """The checkout's commit, with + where its files differ from it; None outside of a checkout."""
    if not (ROOT / ".git").exists():
        return None

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def plain(value: Any) -> Any:
    """What JSON can hold everywhere: numbers that are not finite become text, as do keys."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def render(facts: dict[str, Any]) -> str:
    """The page: self-contained, no script."""
    by_number = {check["number"]: check["figures"] for check in facts["checks"]}
    losses = by_number[4]
    return render_page(
        Path(__file__).with_name("page.html.j2"),
        facts=facts,
        chart=loss_chart(losses["losses"], losses.get("heldout", [])) if losses.get("losses") else None,
        generated=by_number[2].get("generated", {}),
        answers=by_number[7].get("answers", []),
        driver=by_number[6].get("cuda_of_the_driver"),
        seen=losses.get("seen_in_training", 0),
    )


def loss_chart(losses: Sequence[float | str], heldout: Sequence[tuple[int, float | str]]) -> Chart:
    """The loss of each step, from 1, and the held-out losses."""
    train = Line("training", [(step, float(loss)) for step, loss in enumerate(losses, 1)])
    held = Line("held out", [(step, float(loss)) for step, loss in heldout], 1, "dashed", marked=True)
    return line_chart([train, held], "optimizer step", "loss")
