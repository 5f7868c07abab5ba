"""A row's own test, in a confined process that does not hold the answer: its calls are sent to the answer's process.

What that process returns are plain data, and only this one says that the test passed. So an answer cannot pass by
replacing what the test uses, by printing what a passed test prints, or by ending early.
"""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Callable
from typing import Any

from wgpu_lora.checks.confine import plain

# Raised by the answer, these would end a loop of the test's instead of failing it.
ENDING = (StopIteration, StopAsyncIteration)


class UntestableError(BaseException):  # not caught by `except Exception`
    """The test gives the answer something that is not plain data."""


def run(
    job: dict[str, str], send: Callable[[str, Any], None], read: Callable[[], bytes], describe: Callable[..., str]
) -> None:
    """Run a test, and send its calls, then "passed", "failed" (with the reason) or "untestable".

    Args:
        job: "prompt", code before the test, whose functions the test may use; "test", which defines `check`;
            "entry_point", the name of the answer's function.
        send, read: of lines, to and from the parent. describe: an exception as text.
    """

    given_others: list[str] = []  # also if the test catches everything

    def untestable(what: object) -> UntestableError:
        given_others.append(f"the test gives the answer {what}")
        return UntestableError(given_others[0])

    def answer(*args: Any, **kwargs: Any) -> Any:
        try:
            given, named = plain.dump(list(args)), plain.dump(kwargs)
        except plain.NotPlainError as error:
            raise untestable(error) from None
        if odd := _opaque([plain.load(given), plain.load(named)]):
            raise untestable(f"{odd}, which is not plain data")
        send("call", json.dumps([given, named]))
        kind, said = json.loads(read())
        if kind == "raised":
            raise _exception(said)
        try:
            value, after = plain.load(said)
        except (plain.NotPlainError, TypeError, ValueError) as error:
            raise RuntimeError(f"the answer returned {error}") from None
        if after is not None:
            _change([*args, *kwargs.values()], [*after[0], *after[1].values()])
        return value

    space: dict[str, Any] = {"__name__": "test"}
    answer.__name__ = job["entry_point"]
    try:
        exec(compile(completed(job["prompt"]), "<prompt>", "exec"), space)
        space[job["entry_point"]] = answer
        exec(compile(job["test"], "<test>", "exec"), space)
        space["check"](answer)
    except UntestableError:
        pass
    except MemoryError:
        return send("failed", "the test ran out of memory")
    except BaseException as error:
        return send("failed", _where(error, job["test"]) + describe(error).removesuffix("AssertionError: "))
    if given_others:
        return send("untestable", given_others[0])
    send("passed", "")


def _opaque(value: Any) -> plain.Opaque | None:
    """The first object in plain data that is none."""
    if isinstance(value, plain.Opaque):
        return value
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    inner = parts if isinstance(parts, list | tuple | set | frozenset) else ()
    return next((found for part in inner if (found := _opaque(part))), None)


def completed(prompt: str) -> str:
    """A prompt as code: a function without a body gets one."""
    for body in ("", "\n    pass"):
        try:
            ast.parse(prompt + body)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            continue
        return prompt + body
    return ""


def _exception(said: str) -> Exception:
    """An exception of the kind that the answer raised, if it is one of Python's; said: "Name: text"."""
    kind = getattr(builtins, said.partition(":")[0], None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, ENDING):
        try:
            return kind(said.partition(": ")[2])
        except TypeError:  # UnicodeDecodeError has other arguments
            pass
    return RuntimeError(said)


def _change(args: list[Any], after: list[Any]) -> None:
    """Give the test's lists, dicts and sets the contents that they have after the call."""
    for old, new in zip(args, after, strict=False):
        if isinstance(old, list | bytearray):
            old[:] = new
        elif isinstance(old, dict | set):
            old.clear()
            old.update(new)


def _where(error: BaseException, test: str) -> str:
    """The test's line that failed, for a failed assert."""
    trace, number = error.__traceback__, 0
    while trace:
        if trace.tb_frame.f_code.co_filename == "<test>":
            number = trace.tb_lineno
        trace = trace.tb_next
    lines = test.splitlines()
    return f"{lines[number - 1].strip()[:160]}: " if 0 < number <= len(lines) else ""
