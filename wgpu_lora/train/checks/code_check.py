"""Run a model's answer against its row's asserts.

The answer is code written by a model, so it is untrusted. It runs in a separate process that can only compute
(checks/confine); its results come back as plain data, and the asserts are evaluated here. The expected values are never
in that process, so an answer can only pass by returning them.

Protection on Linux (x86-64, arm64): a seccomp filter that allows 20 system calls (19 on arm64) and refuses files,
sockets, processes, threads and signals; user, mount, PID, network, IPC, UTS and cgroup namespaces with an empty root,
where the kernel permits them; no environment, no privileges; limits on CPU time, address space (512 MiB), output (256
KiB) and wall-clock time, after which the process is killed with everything that it started. Not covered: kernel bugs,
and waste of time and memory within the limits. Other systems only have an empty environment, the limits that they
support, and an audit hook against accidents: run_check refuses to run there unless `allow_unconfined` is given.

A row's own test (HumanEval's `test`) is code too. It runs in a second process of the same kind, whose calls of the
answer are passed to the answer's process (checks/sandbox/sandbox_child.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from wgpu_lora.names.text import escape_unprintable
from wgpu_lora.train.checks.asserts import Outcome as Returned
from wgpu_lora.train.checks.asserts import RaisedError, parse_check
from wgpu_lora.train.checks.sandbox import plain_data
from wgpu_lora.train.checks.sandbox.sandbox_process import SOMETHING_ELSE, ProcessEnded, SandboxProcess, TimedOutError

MAX_CODE = 1 << 16  # characters
Outcome = Literal["passed", "failed", "timeout", "error"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
_REASON_LENGTH = 300


@dataclass(frozen=True)
class CheckResult:
    """How an answer's check ended, the reason if it did not pass, and whether Python can parse the answer.

    outcome: "passed"; "failed" if a call raised or the check does not hold; "timeout"; or "error" if the answer's
        process ended or sent something else, or the test cannot be run.
    """

    outcome: Outcome
    reason: str
    parses: bool = False

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"


def run_check(code: str, check: str, timeout: float = 5.0, allow_unconfined: bool = False) -> CheckResult:
    """Run `code` in a confined process, compute the calls in `check` there, and evaluate its asserts here.

    Args:
        check: asserts that compare calls with literals (checks/asserts.py).
        timeout: seconds in total, not counting the start of the process.
        allow_unconfined: run it even if the system cannot confine it.

    Raises:
        UserError: the check is invalid, or the system cannot confine the answer.
    """
    assertions = parse_check(check)
    calls = [call for assertion in assertions for call in assertion.calls]

    def judge(process: SandboxProcess) -> CheckResult:
        process.send(code, calls)
        _begin(process)
        for assertion in assertions:
            reason = assertion.judge([_outcome(*process.next()) for _ in assertion.calls])
            if reason is not None:
                return _ended("failed", reason, True)
        return CheckResult("passed", "passed", True)

    return _confined(code, timeout, allow_unconfined, judge)


def run_test(
    code: str, prompt: str, test: str, entry_point: str, timeout: float = 5.0, allow_unconfined: bool = False
) -> CheckResult:
    """Run `code` in a confined process and `check(entry_point)` of a test, as in HumanEval, in another.

    The test and the answer exchange plain data only (checks/sandbox/plain_data.py). Lists, dicts and sets that the
    answer changes are changed for the test.

    Args:
        code: defines a function called `entry_point`.
        prompt: code whose functions the test may use beside the answer's.
        test: defines `check`, which calls its argument.
        timeout: seconds in total, not counting the start of the processes.

    Raises:
        UserError: the system cannot confine the answer, and `allow_unconfined` is not given.
    """

    def judge(answer: SandboxProcess) -> CheckResult:
        with SandboxProcess(prompt + test, timeout, allow_unconfined) as tester:
            answer.start({"code": code})
            _begin(answer)
            tester.start({"prompt": prompt, "test": test, "entry_point": entry_point})
            calls = 0
            while True:
                try:
                    kind, text = tester.next()
                except TimedOutError:
                    raise
                except ProcessEnded as error:
                    return _ended("error", f"the test {error}", True)
                if kind == "passed":
                    text = "" if calls else f"the test does not call {entry_point}, so any answer would pass"
                    return _ended("error" if text else "passed", text or "passed", True)
                if kind != "call":
                    return _ended("error" if kind == "untestable" else "failed", text, True)
                calls += 1
                answer.say([entry_point, *json.loads(text), True])
                kind, text = answer.next()
                if kind not in ("value", "raised"):
                    return _ended("failed" if kind == "failed" else "error", text or SOMETHING_ELSE, True)
                tester.say([kind, text])

    return _confined(code, timeout, allow_unconfined, judge)


def _confined(
    code: str, timeout: float, allow_unconfined: bool, judge: Callable[[SandboxProcess], CheckResult]
) -> CheckResult:
    if len(code) > MAX_CODE:
        return CheckResult("failed", f"is longer than {MAX_CODE:,} characters")
    with SandboxProcess(code, timeout, allow_unconfined) as process:
        try:
            return judge(process)
        except TimedOutError as error:
            return _ended("timeout", str(error), process.parsed)
        except ProcessEnded as error:
            return _ended("error", str(error), process.parsed)
        except _FailedError as error:
            return _ended("failed", str(error), process.parsed)


def _begin(process: SandboxProcess) -> None:
    """Wait until the answer is parsed, which is before any code of it runs. Raises _FailedError."""
    kind, text = process.next()
    process.parsed = kind == "parsed"
    if not process.parsed:
        raise _FailedError(text)


class _FailedError(Exception):
    """The answer could not be executed; the text says why."""


def _outcome(kind: str, message: str) -> Returned:
    """Raises _FailedError."""
    if kind == "failed":
        raise _FailedError(message)

    def outcome() -> Any:
        if kind != "value":
            raise RaisedError(message)
        try:
            return plain_data.load(message)
        except plain_data.NotPlainError as error:
            raise RaisedError(f"returned {error}") from None

    return outcome


def _ended(outcome: Outcome, reason: str, parses: bool) -> CheckResult:
    return CheckResult(outcome, escape_unprintable(reason[:_REASON_LENGTH]), parses)
