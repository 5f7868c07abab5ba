"""proof.json and proof.html."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from wgpu_lora.atomic import write_bytes_atomic
from wgpu_lora.bench.results import commit
from wgpu_lora.pages import render as render_page
from wgpu_lora.pages.chart import Chart, Line, line_chart
from wgpu_lora.proof.context import Proof
from wgpu_lora.proof.finding import Result
from wgpu_lora.strict_json import to_json

SCHEMA = 1
JSON, PAGE = "proof.json", "proof.html"
PACKAGES = ("wgpu-lora", "wgpu", "numpy", "safetensors", "tokenizers", "jinja2", "psutil")


def write_report(result: Result, proof: Proof) -> None:
    """Writes both files into the proof's directory."""
    written = to_json(gather_facts(result, proof), indent=1)
    write_bytes_atomic(proof.out / JSON, f"{written}\n".encode())
    write_bytes_atomic(proof.out / PAGE, render(json.loads(written)).encode())


def gather_facts(result: Result, proof: Proof) -> dict[str, Any]:
    devices, checkout = proof.known(), commit()
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "proven": result.proven,
        "outcome": result.outcome,
        "verdict": result.verdict,
        "seconds": round(sum(check.seconds for check in result.checks), 2),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "wgpu_native": devices.get("wgpu_native"),
        "platform": platform.platform(),
        "commit": checkout and checkout["id"] + "+" * checkout["modified"],
        "command": sys.argv,
        "recipe": {"path": str(proof.recipe), "options": proof.args.as_dict()},
        "devices": devices.get("devices", []),
        "used": devices.get("used", []),
        "used_on": result.devices,
        "require_discrete": proof.discrete,
        "checks": [asdict(check) for check in result.checks],
    }


def render(proof: dict[str, Any]) -> str:
    """The page for the content of proof.json: self-contained, without scripts."""
    figures = {check["number"]: check["figures"] for check in proof["checks"]}
    losses, shown = figures[4].get("losses"), ("index", "name", "driver", "backend", "kind")
    setting = {
        "recipe": proof["recipe"]["path"],
        "devices": proof["used_on"] or "none",
        "discrete GPUs required": proof["require_discrete"],
        "commit": proof["commit"] or "not a checkout",
        "wgpu-native": proof["wgpu_native"] or "not loaded",
        **proof["versions"],
    }
    return render_page(
        Path(__file__).with_name("page.html.j2"),
        proof=proof,
        checks=[(c["number"], c["name"], c["status"], f"{c['seconds']:.1f} s", c["reason"]) for c in proof["checks"]],
        chart=loss_chart(losses, figures[4].get("heldout", [])) if losses else None,
        figures=figures,
        devices=[
            (*(device[name] for name in shown), "yes" if device["index"] in proof["used"] else "no")
            for device in proof["devices"]
        ],
        setting=setting.items(),
    )


def loss_chart(losses: Sequence[float | None], heldout: Sequence[tuple[int, float | None]]) -> Chart:
    """The loss of each step, from 1, and the held-out losses, without those that are None."""
    train = Line("training", [(step, loss) for step, loss in enumerate(losses, 1) if loss is not None])
    held = [(step, loss) for step, loss in heldout if loss is not None]
    return line_chart([train, Line("held out", held, 1, "dashed", marked=True)], "optimizer step", "loss")
