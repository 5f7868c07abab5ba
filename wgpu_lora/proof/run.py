"""Runs the checks of a proof in order and writes the report."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from wgpu_lora.demo.compare import fresh_directory
from wgpu_lora.errors import UserError
from wgpu_lora.proof.checks import ANSWERS, CHECKS, FIRST, LAST
from wgpu_lora.proof.checks.answers import check_answers_can_run
from wgpu_lora.proof.children import Children
from wgpu_lora.proof.context import Proof, Refused, hardware, read_recipe
from wgpu_lora.proof.finding import FAILED, LEFT_OUT, NOT_RUN, PASSED, Check, Finding, NotRun, Result
from wgpu_lora.proof.report import write_report
from wgpu_lora.worker.parent import WorkerFailed

RECIPE, OUT = "wgpu-proof", "proof"


class Interrupted(KeyboardInterrupt):
    """directory: where the logs are."""

    def __init__(self, directory: Path):
        super().__init__(f"interrupted: {directory}")
        self.directory = directory


def on_devices(found: dict[str, Any]) -> str:
    """The devices used, from the result of jobs.devices; empty if there are none.

    "2 software devices (llvmpipe, SwiftShader); no discrete GPU was at hand".
    """
    kinds: dict[str, list[str]] = {}
    for device in hardware(found):
        kinds.setdefault(device["kind"], []).append(device["name"])
    said = " and ".join(
        f"{len(names)} {kind} device{'s' * (len(names) > 1)} ({', '.join(names)})" for kind, names in kinds.items()
    )
    if not said or "discrete" in kinds:
        return said
    had = any(device["kind"] == "discrete" for device in found["devices"])
    return f"{said}; no discrete GPU was {'used' if had else 'at hand'}"


def prove(
    recipe: str = RECIPE,
    devices: str | None = None,
    out: Path = Path(OUT),
    only: Iterable[int] = (),
    allow_unconfined: bool = False,
    begun: Callable[[str], None] = lambda name: None,
    done: Callable[[Check], None] = lambda check: None,
    discrete: int = 0,
) -> Result:
    """Runs the checks in child processes and writes proof.json, proof.html and logs.

    Args:
        devices: indices or names, separated by commas; by default, the first two different ones.
        out: a directory, which gets a number if it is in use.
        only: numbers of the checks to run; by default, all.
        allow_unconfined: whether to run answers on a system that cannot confine them.
        begun, done: called before and after every check that runs.
        discrete: how many discrete devices must be used; with fewer, only check 1 runs.

    Raises:
        UserError: the recipe, --devices, --require-discrete or --out cannot be followed, or answers cannot be confined.
        Interrupted: on KeyboardInterrupt; the children are ended, and their logs stay.
    """
    _check_options(out, devices, discrete)
    args, path = read_recipe(recipe)
    wanted = set(only) or set(CHECKS)
    if ANSWERS in wanted:
        check_answers_can_run(args, allow_unconfined)
    out = fresh_directory(out)
    made = not out.exists()
    proof = Proof(out, path, args, devices, Children(out), discrete, allow_unconfined)
    checks: list[Check] = []
    try:
        lacking = _lacking(proof)
        for number in sorted(CHECKS, key=lambda n: (n == LAST, n)):
            name, why = CHECKS[number][0], None if number in wanted else LEFT_OUT
            if lacking and number != FIRST:
                why = lacking
            if why:
                checks.append(Check(number, name, NOT_RUN, 0.0, why))
                continue
            begun(f"{number} {name}")
            checks.append(carry_out(number, *CHECKS[number], proof))
            done(checks[-1])
    except Refused:
        proof.children.end()
        for directory in out.iterdir():
            shutil.rmtree(directory)
        if made:
            out.rmdir()
        raise
    except KeyboardInterrupt as error:
        raise Interrupted(out) from error
    finally:
        proof.children.end()
        for cache in (out / "cache", *out.glob("work/packed-*")):
            shutil.rmtree(cache, ignore_errors=True)
    result = Result(sorted(checks, key=lambda check: check.number), out, on_devices(proof.known()), lacking)
    write_report(result, proof)
    return result


def _check_options(out: Path, devices: str | None, discrete: int) -> None:
    if devices is not None and not all(part.strip() for part in devices.split(",")):
        raise UserError(f"--devices '{devices}' has an empty place: give indices or names between commas, such as 0,1.")
    taken = next((path for path in (out, *out.parents) if path.exists() and not path.is_dir()), None)
    if taken:
        raise UserError(f"--out {out} cannot be a directory, because {taken} is a file: choose another place.")
    if discrete < 0:
        raise UserError(f"--require-discrete must be 0 or more, not {discrete}.")


def _lacking(proof: Proof) -> str | None:
    """Why --require-discrete is not met, if it is not; asked before anything else."""
    try:
        return proof.lacks_discrete()
    except WorkerFailed as error:
        return f"--require-discrete {proof.discrete}, but the devices could not be listed: {error}"


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
    except Exception as error:  # a fault of one check must not cost the others' findings
        finding.faults.append(f"the check itself broke: {type(error).__name__}: {error}")
    if finding.faults:
        status, reason = FAILED, "; ".join(finding.faults)
    return Check(number, name, status, round(time.perf_counter() - begin, 2), reason, finding.figures)
