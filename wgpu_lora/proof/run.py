"""Runs the checks of a proof, one after the other, and writes what they found."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from wgpu_lora.demo.compare import fresh_directory
from wgpu_lora.errors import UserError
from wgpu_lora.proof.checks import ANSWERS, CHECKS, LAST
from wgpu_lora.proof.checks.answers import check_answers_can_run
from wgpu_lora.proof.children import Children
from wgpu_lora.proof.context import Proof, Refused, read_recipe
from wgpu_lora.proof.finding import FAILED, LEFT_OUT, NOT_RUN, Check, Finding, NotRun, Result
from wgpu_lora.proof.report import write_report
from wgpu_lora.worker.parent import WorkerFailed

RECIPE, OUT = "wgpu-proof", "proof"
FIRST = 1  # the check of the devices


class Interrupted(KeyboardInterrupt):
    """directory: where the logs of what was done are."""

    def __init__(self, directory: Path):
        super().__init__(f"interrupted: {directory}")
        self.directory = directory


def on_devices(found: dict[str, Any]) -> str:
    """What jobs.devices found to be used, by kind and name; empty where nothing is.

    "2 software devices (llvmpipe, SwiftShader); no discrete GPU was at hand".
    """
    devices, kinds = found.get("devices", []), dict[str, list[str]]()
    # One may be listed by several APIs.
    for index in dict(zip(found.get("hardware", []), found.get("used", []), strict=True)).values():
        kinds.setdefault(devices[index]["kind"], []).append(devices[index]["name"])
    said = " and ".join(
        f"{len(names)} {kind} device{'s' * (len(names) > 1)} ({', '.join(names)})" for kind, names in kinds.items()
    )
    if not said or "discrete" in kinds:
        return said
    had = any(device["kind"] == "discrete" for device in devices)
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
        devices: indices or names, separated by commas; left out, the first two different ones.
        out: a directory, which gets a number where it holds something.
        only: numbers of the checks to do; left out, all.
        allow_unconfined: whether to run answers on a system that cannot confine them.
        begun, done: called before and after every check that is done.
        discrete: discrete devices that have to be used; with fewer, nothing but check 1 is done.

    Raises:
        UserError: the recipe, --devices, --require-discrete or --out cannot be followed, or answers cannot be confined.
        Interrupted: by a KeyboardInterrupt; the children are ended and their logs are left.
    """
    _check_places(out, devices)
    if discrete < 0:
        raise UserError(f"--require-discrete must be 0 or more, not {discrete}.")
    args, path = read_recipe(recipe)
    wanted = set(only) or set(CHECKS)
    if ANSWERS in wanted:
        check_answers_can_run(args, allow_unconfined)
    out = fresh_directory(out)
    made = not out.exists()
    proof = Proof(out, path, args, devices, Children(out), discrete, allow_unconfined)
    checks: list[Check] = []
    lacking: str | None = None
    try:
        lacking = _lacking(proof)
        for number in sorted(CHECKS, key=lambda n: (n == LAST, n)):
            if lacking and number != FIRST:
                checks.append(Check(number, CHECKS[number][0], 0.0, Finding(NOT_RUN, lacking)))
            elif number in wanted:
                begun(f"{number} {CHECKS[number][0]}")
                checks.append(_do(number, proof))
                done(checks[-1])
            else:
                checks.append(Check(number, CHECKS[number][0], 0.0, Finding(NOT_RUN, LEFT_OUT)))
    except Refused:
        proof.children.end()
        for path in out.iterdir():
            shutil.rmtree(path)
        if made:
            out.rmdir()
        raise
    except KeyboardInterrupt as error:
        raise Interrupted(out) from error
    finally:
        proof.children.end()
        _tidy(out)
    result = Result(sorted(checks, key=lambda check: check.number), out, on_devices(proof.known()), lacking)
    write_report(result, proof)
    return result


def _check_places(out: Path, devices: str | None) -> None:
    if devices is not None and not all(part.strip() for part in devices.split(",")):
        raise UserError(f"--devices '{devices}' has an empty place: give indices or names between commas, such as 0,1.")
    taken = next((path for path in (out, *out.parents) if path.exists() and not path.is_dir()), None)
    if taken:
        raise UserError(f"--out {out} cannot be a directory, because {taken} is a file: choose another place.")


def _lacking(proof: Proof) -> str | None:
    """What --require-discrete does not get here, asked before anything else; what fails otherwise is for the checks."""
    try:
        return proof.lacks_discrete()
    except WorkerFailed as error:
        return f"--require-discrete {proof.discrete}, but the devices could not be found out: {error}"


def _do(number: int, proof: Proof) -> Check:
    name, check = CHECKS[number]
    begin = time.perf_counter()
    try:
        finding = check(proof)
    except NotRun as error:
        finding = Finding(NOT_RUN, str(error))
    except Refused:
        raise
    except (WorkerFailed, UserError) as error:
        finding = Finding(FAILED, str(error))
    except Exception as error:  # one check's fault must not cost the others' findings
        finding = Finding(FAILED, f"the check itself broke: {type(error).__name__}: {error}")
    return Check(number, name, time.perf_counter() - begin, finding)


def _tidy(out: Path) -> None:
    """Leaves the logs, the run and the reports; caches and packed models are made again."""
    for path in (out / "cache", *out.glob("work/packed-*")):
        shutil.rmtree(path, ignore_errors=True)
