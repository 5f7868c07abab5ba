"""Runs the checks of a proof in order and writes the report."""

from __future__ import annotations

import json
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from wgpu_lora.bench.brick_results import commit
from wgpu_lora.cli.proof.checks import CHECKS, check_answers_can_run
from wgpu_lora.cli.proof.proof_context import (
    LEFT_OUT,
    NOT_RUN,
    PROVEN,
    Check,
    Proof,
    Result,
    carry_out,
    on_devices,
    read_recipe,
)
from wgpu_lora.cli.proof.watched_workers import Children
from wgpu_lora.cli.report.line_chart import Chart, Series, line_chart
from wgpu_lora.cli.report.page import render as render_page
from wgpu_lora.cluster.worker.worker import WorkerFailed
from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import numbered, write_bytes_atomic
from wgpu_lora.files.json_files import to_json
from wgpu_lora.files.locks import check_output, locked

DEVICES = 1
ANSWERS = 7  # runs code that a model wrote
GRADIENTS = 8
LAST = 6  # watches all the others
NO_DEVICES = {"devices": [], "hardware": [], "used": [], "asked": False, "computed": {}, "webgpu": {}}


def prove(
    recipe: str = "wgpu-proof",
    devices: str | None = None,
    out: Path = Path("proof"),
    only: Iterable[int] = (),
    allow_unconfined: bool = False,
    discrete: int = 0,
    line: Callable[[str, str], None] = lambda label, text: None,
) -> Result:
    """Runs the checks in child processes and writes proof.json, proof.html and logs; the options are the command's.

    Args:
        out: a directory, which gets a number if it is in use.
        line: shows the progress. On KeyboardInterrupt, it says where the logs of the ended children are.

    Raises:
        UserError: an option cannot be followed, or answers cannot be confined.
    """
    if devices is not None and not all(part.strip() for part in devices.split(",")):
        raise UserError(f"--devices '{devices}' has an empty entry: give indices or names, such as 0,1.")
    check_output(out / "work", "--out")
    if discrete < 0:
        raise UserError(f"--require-discrete must be 0 or more, not {discrete}.")
    args, path = read_recipe(recipe)
    numbers = set(only) or set(CHECKS)
    if ANSWERS in numbers:
        check_answers_can_run(args, allow_unconfined)
    out = numbered(out)
    with locked(out, "--out"):
        children = Children(out)
        checks: list[Check] = []
        try:
            try:
                device_list = children.run("devices", "proof-devices", select=devices, discrete=discrete)
            except WorkerFailed as error:
                device_list = {**NO_DEVICES, "error": str(error)}
            if "refused" in device_list:
                raise UserError(device_list["refused"])
            differences = GRADIENTS in numbers and args.compute_dtype == "f32"
            proof = Proof(out, path, args, device_list, children, discrete, allow_unconfined, differences)
            lacking = proof.lacks_discrete()
            run = {DEVICES} if lacking else numbers
            for number in sorted(CHECKS, key=lambda n: (n == LAST, n)):
                name, check = CHECKS[number]
                if number not in run:
                    checks.append(Check(number, name, NOT_RUN, 0.0, lacking or LEFT_OUT))
                    continue
                line("check", f"{number} {name}")
                checks.append(outcome := carry_out(number, name, check, proof))
                line("", f"{outcome.status} in {outcome.seconds:.1f} s: {outcome.reason}")
        except UserError:  # there is nothing to prove
            children.end()
            shutil.rmtree(out, ignore_errors=True)
            raise
        except KeyboardInterrupt:
            line("interrupted", f"the logs so far are in {out}/logs/")
            raise
        finally:
            children.end()
    checks.sort(key=lambda check: check.number)
    result = Result(checks, out, on_devices(proof.devices))
    write_report(result, proof)
    return result


SCHEMA = 1
PACKAGES = ("wgpu-lora", "wgpu", "numpy", "safetensors", "tokenizers", "jinja2", "psutil")


def write_report(result: Result, proof: Proof) -> None:
    """Writes both files into the proof's directory."""
    devices, checkout = proof.devices, commit()
    record = {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "proven": result.outcome == PROVEN,
        "outcome": result.outcome,
        "verdict": result.verdict,
        "seconds": round(sum(check.seconds for check in result.checks), 2),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "webgpu": devices["webgpu"],
        "platform": platform.platform(),
        "commit": checkout and checkout["id"],
        "command": sys.argv,
        "recipe": {"path": str(proof.recipe), "options": proof.args.as_dict()},
        "devices": devices["devices"],
        "used": devices["used"],
        "used_on": result.devices,
        "require_discrete": proof.discrete,
        "checks": [asdict(check) for check in result.checks],
    }
    text = to_json(record, indent=1)
    write_bytes_atomic(proof.out / "proof.json", f"{text}\n".encode())
    write_bytes_atomic(proof.out / "proof.html", render(json.loads(text)).encode())


def render(proof: dict[str, Any]) -> str:
    """The page for the content of proof.json: self-contained, without scripts."""
    figures = {check["number"]: check["figures"] for check in proof["checks"]}
    losses, heldout = figures[4].get("losses"), figures[4].get("heldout", [])
    chart = loss_chart(losses, heldout) if losses else None
    return render_page(Path(__file__).with_name("page.html.j2"), proof=proof, figures=figures, chart=chart)


def loss_chart(losses: Sequence[float | None], heldout: Sequence[tuple[int, float | None]]) -> Chart:
    """The loss of each step, from 1, and the held-out losses, without those that are None."""
    train = Series("training", [(step, loss) for step, loss in enumerate(losses, 1) if loss is not None])
    points = [(step, loss) for step, loss in heldout if loss is not None]
    return line_chart([train, Series("held out", points, 1, "dashed", marked=True)], "optimizer step", "loss")
