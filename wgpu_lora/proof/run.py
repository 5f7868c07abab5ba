"""Runs the checks of a proof in order and writes the report."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from wgpu_lora.atomic import numbered
from wgpu_lora.errors import UserError
from wgpu_lora.locks import check_output, locked
from wgpu_lora.proof.checks.answers import answers_pass_their_checks, check_answers_can_run
from wgpu_lora.proof.checks.cuda import no_cuda
from wgpu_lora.proof.checks.devices import devices_agree, devices_compute
from wgpu_lora.proof.checks.program import gradients_agree, resuming_is_exact, work_happened_on_the_device
from wgpu_lora.proof.checks.training import losses_fall, training_beside_evaluating
from wgpu_lora.proof.children import Children
from wgpu_lora.proof.context import Proof, Refused, hardware, read_recipe
from wgpu_lora.proof.finding import FAILED, LEFT_OUT, NOT_RUN, PASSED, Check, Finding, NotRun, Result
from wgpu_lora.proof.report import write_report
from wgpu_lora.words import counted
from wgpu_lora.worker.parent import WorkerFailed

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
    said = " and ".join(f"{counted(len(of), f'{kind} device')} ({', '.join(of)})" for kind, of in kinds.items())
    if not said or "discrete" in kinds:
        return said
    had = any(device["kind"] == "discrete" for device in found["devices"])
    return f"{said}; no discrete GPU was {'used' if had else 'found'}"


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
    made = not out.exists()
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
        if made:
            out.rmdir()
        raise
    except KeyboardInterrupt as error:
        raise Interrupted(out) from error
    finally:
        proof.children.end()
        for cache in (out / "cache", *out.glob("work/packed-*")):
            shutil.rmtree(cache, ignore_errors=True)
        lock.close()
    result = Result(sorted(checks, key=lambda check: check.number), out, on_devices(proof.known()), lacking)
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
