"""Run a model's answer against its row's asserts, in a confined child process.

The answer is text that a model wrote, so nothing about it is trusted: it is parsed first, then run by a fresh
interpreter with no inherited environment, an empty temporary directory, limits on CPU time and memory where the
platform has them, and an audit hook that refuses files for writing, sockets, processes and ctypes. That stops
accidents, not a determined attacker: CPython's audit hooks are no sandbox.
"""

from __future__ import annotations

import ast
import json
import os
import secrets
import subprocess
import sys
import tempfile
from dataclasses import dataclass

MEMORY_LIMIT = 512 * 1024 * 1024
_REASON_LENGTH = 300

# The job comes by stdin, so that no file has to exist in the child's directory. A verdict counts only with the job's
# nonce, so an answer that ends the child early, or prints, does not pass by it.
_RUNNER = r"""
import json, sys
job = json.loads(sys.stdin.buffer.read())
try:
    import resource
except ImportError:
    resource = None
if resource is not None:
    for name, value in (("RLIMIT_CPU", job["cpu"]), ("RLIMIT_AS", job["memory"]), ("RLIMIT_FSIZE", 0),
                        ("RLIMIT_CORE", 0), ("RLIMIT_NOFILE", 32)):
        try:
            hard = resource.getrlimit(getattr(resource, name))[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(getattr(resource, name), (value, value))
        except (AttributeError, ValueError, OSError):
            pass
out = sys.stdout
sys.stdout = sys.stderr = open("/dev/null" if sys.platform != "win32" else "nul", "w")
REFUSED = ("os.", "socket.", "subprocess.", "shutil.", "ctypes.", "tempfile.", "pty.", "signal.", "resource.")
ALLOWED = ("os.listdir",)  # the import system's own
def guard(event, args):
    if event == "open" and not (isinstance(args[1], str) and not set(args[1]) & set("wax+")):
        raise PermissionError("open for writing")
    if event.startswith(REFUSED) and event not in ALLOWED:
        raise PermissionError(event)
sys.addaudithook(guard)
def main():
    space = {"__name__": "answer", "__builtins__": __builtins__}
    try:
        exec(compile(job["code"], "<answer>", "exec"), space)
        exec(compile(job["check"], "<check>", "exec"), space)
    except AssertionError as error:
        return "assertion failed" + (": " + str(error) if str(error) else "")
    except MemoryError:
        return "out of memory"
    except BaseException as error:
        return type(error).__name__ + ": " + str(error)
    return None
secret = job.pop("nonce")
reason = main()
out.write(json.dumps({"nonce": secret, "reason": reason}))
out.flush()
"""


@dataclass(frozen=True)
class CheckResult:
    """Whether the answer passed, and if not, why not."""

    passed: bool
    reason: str


def _environment() -> dict[str, str]:
    # Windows cannot start Python without SYSTEMROOT; nothing else is passed on.
    return {name: os.environ[name] for name in ("SYSTEMROOT",) if name in os.environ}


def run_check(code: str, check: str, timeout: float = 5.0) -> CheckResult:
    """Define `code` in a confined child process, run the asserts of `check` against it, and report the verdict."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        return CheckResult(False, f"does not parse: {error}"[:_REASON_LENGTH])
    if not any(isinstance(node, ast.FunctionDef) for node in tree.body):
        return CheckResult(False, "defines no function")
    nonce = secrets.token_hex(16)
    job = {"code": code, "check": check, "nonce": nonce, "cpu": max(1, int(timeout) + 1), "memory": MEMORY_LIMIT}
    try:
        payload = json.dumps(job).encode()
        with tempfile.TemporaryDirectory(prefix="wgpu-lora-check-") as directory:
            child = subprocess.run(
                [sys.executable, "-I", "-S", "-c", _RUNNER],
                input=payload,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=directory,
                env=_environment(),
                timeout=timeout,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return CheckResult(False, f"no answer in {timeout:g} s")
    try:
        verdict = json.loads(child.stdout)
        genuine = verdict["nonce"] == nonce
        reason = verdict["reason"]
    except (ValueError, KeyError, TypeError):
        genuine, reason = False, None
    if not genuine:
        return CheckResult(False, f"the child ended without a verdict (exit code {child.returncode})")
    if reason is None:
        return CheckResult(True, "passed")
    return CheckResult(False, str(reason)[:_REASON_LENGTH])
