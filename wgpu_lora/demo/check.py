"""Run a model's answer against its row's asserts.

The answer is code written by a model, so it is untrusted. It runs in a separate process that can only compute
(demo/confine); its results come back as plain data, and the asserts are evaluated here. The expected values are never
in that process, so an answer can only pass by returning them.

Protection on Linux (x86-64, arm64): a seccomp filter that allows 19 system calls (18 on arm64) and refuses files,
sockets, processes, threads and signals; user, mount, PID, network, IPC, UTS and cgroup namespaces with an empty root,
where the kernel permits them; no environment, no privileges; limits on CPU time, address space (512 MiB), output (256
KiB) and wall-clock time, after which the process is killed with everything that it started. Not covered: kernel bugs,
and waste of time and memory within the limits. Other systems only have an empty environment, the limits that they
support,
and an audit hook against accidents: run_check refuses to run there unless `allow_unconfined` is given.
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
    """Whether the answer passed, the reason if it did not, and whether Python can parse it."""

    passed: bool
    reason: str
    parses: bool = False


def run_check(code: str, check: str, timeout: float = 5.0, allow_unconfined: bool = False) -> CheckResult:
    """Run `code` in a confined process, compute the calls in `check` there, and evaluate its asserts here.

    Args:
        check: asserts that compare calls with literals (demo/asserts.py).
        timeout: seconds in total, not counting the start of the process.
        allow_unconfined: run it even if the system cannot confine it.

    Raises:
        UserError: the check is invalid, or the system cannot confine the answer.
    """
    assertions = parse_check(check)
    if len(code) > MAX_CODE:
        return CheckResult(False, f"is longer than {MAX_CODE:,} characters")
    parses = False
    with Process(code, timeout, allow_unconfined) as process:
        process.send(code, [call for assertion in assertions for call in assertion.calls])
        try:
            kind, said = process.next()
            parses = kind == "parsed"  # sent before any code of the answer runs
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
    """The answer could not be executed; the text says why."""


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
