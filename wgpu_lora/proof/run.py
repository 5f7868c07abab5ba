"""Runs the checks of a proof, one after the other, and writes what they found."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wgpu_lora.demo.compare import fresh_directory
from wgpu_lora.errors import UserError
from wgpu_lora.proof.checks import ANSWERS, CHECKS, LAST
from wgpu_lora.proof.checks.answers import check_answers_can_run
from wgpu_lora.proof.children import Children
from wgpu_lora.proof.context import Proof, Refused, read_recipe
from wgpu_lora.proof.finding import FAILED, NOT_RUN, PASSED, ChildFailed, Finding, NotRun
from wgpu_lora.proof.report import write_report

RECIPE, OUT = "wgpu-proof", "proof"


class Interrupted(KeyboardInterrupt):
    """directory: where the logs of what was done are."""

    def __init__(self, directory: Path):
        super().__init__(f"interrupted: {directory}")
        self.directory = directory


@dataclass(frozen=True)
class Check:
    """A check that has been done, or could not be."""

    number: int
    name: str
    seconds: float
    finding: Finding

    def as_dict(self) -> dict[str, Any]:
        finding = self.finding
        return {
            "number": self.number,
            "name": self.name,
            "status": finding.status,
            "seconds": round(self.seconds, 2),
            "reason": finding.reason,
            "figures": finding.figures,
        }


@dataclass(frozen=True)
class Result:
    """checks: all nine, by number. code: 1 where one failed, or none passed."""

    checks: list[Check]
    directory: Path

    def count(self, status: str) -> int:
        return sum(check.finding.status == status for check in self.checks)

    @property
    def proven(self) -> bool:
        return self.count(PASSED) == len(self.checks)

    @property
    def code(self) -> int:
        return int(bool(self.count(FAILED)) or not self.count(PASSED))

    @property
    def verdict(self) -> str:
        if self.proven:
            return "Proven here: all of training and inference happened on wgpu, without CUDA."
        said = []
        for status in (FAILED, NOT_RUN):
            numbers = [str(check.number) for check in self.checks if check.finding.status == status]
            said += [f"{status}: {', '.join(numbers)}"] if numbers else []
        return f"Not proven: {self.count(PASSED)} of {len(self.checks)} checks passed; {'; '.join(said)}."


def prove(
    recipe: str = RECIPE,
    devices: str | None = None,
    out: Path = Path(OUT),
    only: Iterable[int] = (),
    allow_unconfined: bool = False,
    begun: Callable[[str], None] = lambda name: None,
    done: Callable[[Check], None] = lambda check: None,
) -> Result:
    """Runs the checks in child processes and writes proof.json, proof.html and logs.

    Args:
        devices: indices or names, separated by commas; left out, the first two different ones.
        out: a directory, which gets a number where it holds something.
        only: numbers of the checks to do; left out, all.
        allow_unconfined: whether to run answers on a system that cannot confine them.
        begun, done: called before and after every check that is done.

    Raises:
        UserError: the recipe, --devices or --out cannot be followed, or answers cannot be confined.
        Interrupted: by a KeyboardInterrupt; the children are ended and their logs are left.
    """
    _check_places(out, devices)
    args, path = read_recipe(recipe)
    wanted = set(only) or set(CHECKS)
    if ANSWERS in wanted:
        check_answers_can_run(args, allow_unconfined)
    out = fresh_directory(out)
    made = not out.exists()
    proof = Proof(out, path, args, devices, Children(out), allow_unconfined)
    checks: list[Check] = []
    try:
        for number in sorted(CHECKS, key=lambda n: (n == LAST, n)):
            if number in wanted:
                begun(f"{number} {CHECKS[number][0]}")
                checks.append(_do(number, proof))
                done(checks[-1])
            else:
                checks.append(Check(number, CHECKS[number][0], 0.0, Finding(NOT_RUN, "left out by --only")))
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
    result = Result(sorted(checks, key=lambda check: check.number), out)
    write_report(result, proof)
    return result


def _check_places(out: Path, devices: str | None) -> None:
    if devices is not None and not all(part.strip() for part in devices.split(",")):
        raise UserError(f"--devices '{devices}' has an empty place: give indices or names between commas, such as 0,1.")
    taken = next((path for path in (out, *out.parents) if path.exists() and not path.is_dir()), None)
    if taken:
        raise UserError(f"--out {out} cannot be a directory, because {taken} is a file: choose another place.")


def _do(number: int, proof: Proof) -> Check:
    name, check = CHECKS[number]
    begin = time.perf_counter()
    try:
        finding = check(proof)
    except NotRun as error:
        finding = Finding(NOT_RUN, str(error))
    except Refused:
        raise
    except (ChildFailed, UserError) as error:
        finding = Finding(FAILED, str(error))
    except Exception as error:  # one check's fault must not cost the others' findings
        finding = Finding(FAILED, f"the check itself broke: {type(error).__name__}: {error}")
    return Check(number, name, time.perf_counter() - begin, finding)


def _tidy(out: Path) -> None:
    """Leaves the logs, the run and the reports; caches and packed models are made again."""
    for path in (out / "cache", *out.glob("work/packed-*")):
        shutil.rmtree(path, ignore_errors=True)
