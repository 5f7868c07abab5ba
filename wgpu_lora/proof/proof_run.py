"""Runs the checks of a proof in order and writes the report."""

from __future__ import annotations

import json
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from wgpu_lora.atomic import numbered, write_bytes_atomic
from wgpu_lora.bench.brick_results import commit
from wgpu_lora.errors import UserError
from wgpu_lora.locks import check_output, locked
from wgpu_lora.proof.checks import (
    answers_pass_their_checks,
    check_answers_can_run,
    devices_agree,
    devices_compute,
    gradients_agree,
    losses_fall,
    resuming_is_exact,
    training_beside_evaluating,
    work_happened_on_the_device,
)
from wgpu_lora.proof.cuda_check import no_cuda
from wgpu_lora.proof.proof_context import (
    FAILED,
    LEFT_OUT,
    NOT_RUN,
    PASSED,
    Check,
    Finding,
    NotRun,
    Proof,
    Refused,
    Result,
    hardware,
    read_recipe,
)
from wgpu_lora.proof.watched_workers import Children
from wgpu_lora.report.line_chart import Chart, Line, line_chart
from wgpu_lora.report.page import render as render_page
from wgpu_lora.strict_json import to_json
from wgpu_lora.words import count_noun
from wgpu_lora.worker.worker import WorkerFailed

# Each notes figures and faults, and returns what it found if there is no fault.
CHECKS: dict[int, tuple[str, Callable[[Proof, Finding], str]]] = {
    1: ("devices", devices_compute),
    2: ("import and generate", devices_agree),
    3: ("finetune, evaluate", training_beside_evaluating),
    4: ("losses fall", losses_fall),
    5: ("backend", work_happened_on_the_device),
    6: ("no CUDA", no_cuda),
    7: ("answers", answers_pass_their_checks),
    8: ("gradients", gradients_agree),
    9: ("resume", resuming_is_exact),
}
DEVICES = 1
ANSWERS = 7  # runs code that a model wrote
LAST = 6  # watches all the others


class Interrupted(KeyboardInterrupt):
    """args: the directory of the logs."""


def on_devices(found: dict[str, Any]) -> str:
    """The devices used, from the result of jobs.devices; empty if there are none.

    "2 software devices (llvmpipe, SwiftShader); no discrete GPU was found".
    """
    kinds: dict[str, list[str]] = {}
    for device in hardware(found):
        kinds.setdefault(device["kind"], []).append(device["name"])
    text = " and ".join(f"{count_noun(len(of), f'{kind} device')} ({', '.join(of)})" for kind, of in kinds.items())
    if not text or "discrete" in kinds:
        return text
    had = any(device["kind"] == "discrete" for device in found["devices"])
    return f"{text}; no discrete GPU was {'used' if had else 'found'}"


def prove(
    recipe: str = "wgpu-proof",
    devices: str | None = None,
    out: Path = Path("proof"),
    only: Iterable[int] = (),
    allow_unconfined: bool = False,
    begun: Callable[[str], None] = lambda name: None,
    done: Callable[[Check], None] = lambda check: None,
    discrete: int = 0,
) -> Result:
    """Runs the checks in child processes and writes proof.json, proof.html and logs; the options are the command's.

    Args:
        out: a directory, which gets a number if it is in use.
        begun, done: called before and after every check that runs.

    Raises:
        UserError: an option cannot be followed, or answers cannot be confined.
        Interrupted: on KeyboardInterrupt; the children are ended, and their logs stay in the directory that it names.
    """
    _check_options(out, devices, discrete)
    args, path = read_recipe(recipe)
    wanted = set(only) or set(CHECKS)
    if ANSWERS in wanted:
        check_answers_can_run(args, allow_unconfined)
    out = numbered(out)
    is_new = not out.exists()
    proof = Proof(out, path, args, devices, Children(out), discrete, allow_unconfined)
    checks: list[Check] = []
    lock = ExitStack()
    lock.enter_context(locked(out, "--out"))
    try:
        lacking = proof.lacks_discrete()
        for number in sorted(CHECKS, key=lambda n: (n == LAST, n)):
            name, check = CHECKS[number]
            why = lacking if lacking and number != DEVICES else None if number in wanted else LEFT_OUT
            if why:
                checks.append(Check(number, name, NOT_RUN, 0.0, why))
                continue
            begun(f"{number} {name}")
            checks.append(carry_out(number, name, check, proof))
            done(checks[-1])
    except Refused:
        proof.children.end()
        for directory in out.iterdir():
            shutil.rmtree(directory)
        if is_new:
            out.rmdir()
        raise
    except KeyboardInterrupt as error:
        raise Interrupted(out) from error
    finally:
        proof.children.end()
        for cache in (out / "cache", *out.glob("work/packed-*")):
            shutil.rmtree(cache, ignore_errors=True)
        lock.close()
    result = Result(sorted(checks, key=lambda check: check.number), out, on_devices(proof.known_devices()), lacking)
    write_report(result, proof)
    return result


def _check_options(out: Path, devices: str | None, discrete: int) -> None:
    if devices is not None and not all(part.strip() for part in devices.split(",")):
        raise UserError(f"--devices '{devices}' has an empty entry: give indices or names, such as 0,1.")
    check_output(out / "work", "--out")
    if discrete < 0:
        raise UserError(f"--require-discrete must be 0 or more, not {discrete}.")


def carry_out(number: int, name: str, check: Callable[[Proof, Finding], str], proof: Proof) -> Check:
    """Runs a check. Raises Refused."""
    begin, finding, status, reason = time.perf_counter(), Finding(), PASSED, ""
    try:
        reason = check(proof, finding)
    except Refused:
        raise
    except NotRun as error:
        status, reason = NOT_RUN, str(error)
    except (WorkerFailed, UserError) as error:
        finding.faults.append(str(error))
    except Exception as error:  # an error in one check must not lose the findings of the others
        finding.faults.append(f"the check itself broke: {type(error).__name__}: {error}")
    if finding.faults:
        status, reason = FAILED, "; ".join(finding.faults)
    return Check(number, name, status, round(time.perf_counter() - begin, 2), reason, finding.figures)


SCHEMA = 1
JSON, PAGE = "proof.json", "proof.html"
PACKAGES = ("wgpu-lora", "wgpu", "numpy", "safetensors", "tokenizers", "jinja2", "psutil")


def write_report(result: Result, proof: Proof) -> None:
    """Writes both files into the proof's directory."""
    written = to_json(gather_facts(result, proof), indent=1)
    write_bytes_atomic(proof.out / JSON, f"{written}\n".encode())
    write_bytes_atomic(proof.out / PAGE, render(json.loads(written)).encode())


def gather_facts(result: Result, proof: Proof) -> dict[str, Any]:
    devices, checkout = proof.known_devices(), commit()
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
