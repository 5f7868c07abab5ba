"""Run a model's answer against its row's asserts.

The answer is text that a model wrote, so nothing about it is trusted. It runs in a process of its own that can only
compute (demo/confine): it is called there, its results come back as plain data, and the asserts are decided here. What
they expect is never in that process, so an answer passes by returning it and by nothing else.

What protects, on Linux (x86-64, arm64): a seccomp filter that allows 19 system calls (18 on arm64) and refuses files,
sockets, processes, threads and signals; user, mount, PID, network, IPC, UTS and cgroup namespaces with an empty root,
where the kernel grants them; no environment, no privileges; limits on CPU time, address space (512 MiB), output (256
KiB) and wall-clock time, after which the process is killed with all that it started. What does not: these are the
kernel's means, so a hole in the kernel is a way out, and time and memory within the limits are the answer's to waste.
Elsewhere there are only an empty environment, the limits that the system has, and an audit hook against accidents:
run_check refuses to run there unless `allow_unconfined` is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wgpu_lora.bounded import printable
from wgpu_lora.demo.asserts import Outcome, RaisedError, parse_check
from wgpu_lora.demo.confine import plain
from wgpu_lora.demo.confine.parent import EndedError, Process

MAX_CODE = 1 << 16  # characters
_REASON_LENGTH = 300


@dataclass(frozen=True)
class CheckResult:
    """Whether the answer passed, and if not, why not; whether Python's parser takes it."""

    passed: bool
    reason: str
    parses: bool = False


def run_check(code: str, check: str, timeout: float = 5.0, allow_unconfined: bool = False) -> CheckResult:
    """Defines `code` in a confined process, has it compute the calls in `check`, and decides the asserts here.

    Args:
        check: asserts that compare calls with literals (demo/asserts.py).
        timeout: seconds for the whole of it, the start of the process aside.
        allow_unconfined: whether to run it on a system that cannot confine it.

    Raises:
        UserError: the check is none, or the system cannot confine the answer.
    """
    assertions = parse_check(check)
    if len(code) > MAX_CODE:
        return CheckResult(False, f"is longer than {MAX_CODE:,} characters")
    parses = False
    with Process(code, timeout, allow_unconfined) as process:
        process.send(code, [call for assertion in assertions for call in assertion.calls])
        try:
            kind, said = process.next()
            parses = kind == "parsed"  # which is said before anything of the answer has run
            if not parses:
                return _failed(said, parses)
            for assertion in assertions:
                reason = assertion.judge([_outcome(*process.next()) for _ in assertion.calls])
                if reason is not None:
                    return _failed(reason, parses)
        except (EndedError, _FailedError) as error:
            return _failed(str(error), parses)
    return CheckResult(True, "passed", parses)


class _FailedError(Exception):
    """The answer could not be defined. The text is why."""


def _outcome(kind: str, said: str) -> Outcome:
    """Raises _FailedError."""
    if kind == "failed":
        raise _FailedError(said)

    def outcome() -> Any:
        if kind != "value":
            raise RaisedError(said)
        try:
            return plain.load(said)
        except plain.NotPlainError as error:
            raise RaisedError(f"returned {error}") from None

    return outcome


def _failed(reason: str, parses: bool) -> CheckResult:
    return CheckResult(False, printable(reason[:_REASON_LENGTH]), parses)
