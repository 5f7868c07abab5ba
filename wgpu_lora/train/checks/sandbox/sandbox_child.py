"""The confined process: gives up all access, reports which confinement it has, then reads an answer and calls it.

argv has a JSON object with modules to import first and limits. The job arrives on stdin once the process is confined,
as lines of JSON: the answer, then calls with literal arguments. The expected results are not in this process, so an
answer cannot pass by finding or changing anything here. A row's own test runs in another such process.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from wgpu_lora.processes import seccomp
from wgpu_lora.train.checks.sandbox import linux_sandbox, plain_data

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

SHOWN = 300  # characters of an exception's text
FILES = 8
_unread = bytearray()
GUARDED = {"os", "socket", "subprocess", "shutil", "ctypes", "tempfile", "pty", "signal", "winreg", "_winapi"}


def main() -> None:
    """Never returns."""
    code = 1
    try:
        try:
            _send("confined", _confine(json.loads(sys.argv[1])))
        except Exception as error:
            _send("broken", _describe(error))
            raise
        job = json.loads(_read())
        if "test" in job:
            run(job, _send, _read, _describe)
        else:
            _serve(job["code"])
        code = 0
    finally:
        os._exit(code)


def _confine(config: dict[str, Any]) -> dict[str, Any]:
    """Confine this process; returns {"namespaces": those entered, "limits": those set, "filter": None or an error}."""
    for name in config["modules"]:
        with suppress(ImportError):
            importlib.import_module(name)
    entered = linux_sandbox.enter() if sys.platform == "linux" else []
    sys.path.clear()
    sys.path_importer_cache.clear()
    sys.argv[:] = [""]
    os.environ.clear()  # including what Python itself set
    sys.stdout = sys.stderr  # /dev/null
    limits = _limit(config["cpu"], config["memory"])
    filter_error = None
    try:
        seccomp.load()
    except OSError as error:
        filter_error = str(error)
    _guard()
    return {"namespaces": entered, "limits": limits, "filter": filter_error}


def _limit(cpu: int, memory: int) -> list[str]:
    if resource is None:
        return []
    limits = {"CPU": cpu, "AS": memory, "NPROC": 0, "FSIZE": 0, "CORE": 0, "NOFILE": FILES, "MEMLOCK": 0, "MSGQUEUE": 0}
    names = []
    for name, value in limits.items():
        with suppress(AttributeError, ValueError, OSError):
            kind = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(kind)[1]
            limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (limit, limit))
            names.append(name)
    return names


def _guard() -> None:
    """Have Python refuse files, sockets and processes.

    Without the filter, this is the only protection against accidents; with it, it turns a refused system call into an
    exception. It does not stop an attack.
    """

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" or event.partition(".")[0] in GUARDED:
            raise PermissionError(event)

    sys.addaudithook(hook)


def _serve(code: str) -> None:
    try:
        compiled = compile(code, "<answer>", "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        return _send("failed", f"does not parse: {_describe(error)}")
    _send("parsed", "")
    module = sys.modules["answer"] = types.ModuleType("answer")
    space = module.__dict__
    reason = _attempt(lambda: exec(compiled, space))[1]
    if reason is not None:
        return _send("failed", reason)
    if not any(callable(value) for name, value in list(space.items()) if name != "__builtins__"):
        return _send("failed", "defines no function")
    while line := _read():
        name, args, kwargs, whole = json.loads(line)
        value, reason = _attempt(lambda: _call(space, name, args, kwargs, whole))  # noqa: B023
        if reason is None:
            _send("value", value)
        elif whole and isinstance(reason, _Unusable):  # a test that expects an exception must not take it for one
            _send("failed", reason)
        else:
            _send("raised", reason)


def _call(space: dict[str, Any], name: str, args: str, kwargs: str, whole: bool) -> str:
    """A function's value, encoded; `whole`: [value, the arguments after the call, None if they did not change]."""
    if name not in space:
        raise NameError(f"name '{name}' is not defined")
    arguments, keywords = plain_data.load(args), plain_data.load(kwargs)
    value = space[name](*arguments, **keywords)
    if not whole:
        return plain_data.dump(value)
    is_equal = plain_data.dump(arguments) == args and plain_data.dump(keywords) == kwargs
    return plain_data.dump([value, None if is_equal else [arguments, keywords]])


class _Unusable(str):
    """The reason of a failure that is no exception of the answer's."""

    __slots__ = ()


def _attempt(run: Callable[[], Any]) -> tuple[Any, str | None]:
    """(result, None), or (None, the reason of the failure)."""
    try:
        return run(), None
    except plain_data.NotPlainError as error:
        return None, _Unusable(f"returned {error}")
    except MemoryError:
        return None, _Unusable("out of memory")
    except BaseException as error:
        return None, _describe(error)


def _describe(error: BaseException) -> str:
    try:
        text = str(error)[:SHOWN]
    except BaseException:
        text = ""
    if isinstance(error, SyntaxError):
        return text
    return f"{type(error).__name__}: {text}"


def _read() -> bytes:
    """The next line of stdin; empty at its end."""
    while b"\n" not in _unread and (chunk := os.read(0, 1 << 16)):
        _unread.extend(chunk)
    end = _unread.find(b"\n") + 1 or len(_unread)
    line = bytes(_unread[:end])
    del _unread[:end]
    return line


def _send(kind: str, payload: Any) -> None:
    data = json.dumps([kind, payload]).encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]


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

    refusals: list[str] = []  # also if the test catches everything

    def untestable(problem: object) -> UntestableError:
        refusals.append(f"the test gives the answer {problem}")
        return UntestableError(refusals[0])

    def answer(*args: Any, **kwargs: Any) -> Any:
        try:
            arguments, keywords = plain_data.dump(list(args)), plain_data.dump(kwargs)
        except plain_data.NotPlainError as error:
            raise untestable(error) from None
        if odd := _opaque([plain_data.load(arguments), plain_data.load(keywords)]):
            raise untestable(f"{odd}, which is not plain data")
        send("call", json.dumps([arguments, keywords]))
        kind, text = json.loads(read())
        if kind == "raised":
            raise _exception(text)
        try:
            value, after = plain_data.load(text)
        except (plain_data.NotPlainError, TypeError, ValueError) as error:
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
        return send("failed", _failed_line(error, job["test"]) + describe(error).removesuffix("AssertionError: "))
    if refusals:
        return send("untestable", refusals[0])
    send("passed", "")


def _opaque(value: Any) -> plain_data.Opaque | None:
    """The first object in plain data that is none."""
    if isinstance(value, plain_data.Opaque):
        return value
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    inner = parts if isinstance(parts, list | tuple | set | frozenset) else ()
    return next((result for part in inner if (result := _opaque(part))), None)


def completed(prompt: str) -> str:
    """A prompt as code: a function without a body gets one."""
    for body in ("", "\n    pass"):
        try:
            ast.parse(prompt + body)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            continue
        return prompt + body
    return ""


def _exception(message: str) -> Exception:
    """An exception of the kind that the answer raised, if it is one of Python's; said: "Name: text"."""
    kind = getattr(builtins, message.partition(":")[0], None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, ENDING):
        try:
            return kind(message.partition(": ")[2])
        except TypeError:  # UnicodeDecodeError has other arguments
            pass
    return RuntimeError(message)


def _change(args: list[Any], after: list[Any]) -> None:
    """Give the test's lists, dicts and sets the contents that they have after the call."""
    for old, new in zip(args, after, strict=False):
        if isinstance(old, list | bytearray):
            old[:] = new
        elif isinstance(old, dict | set):
            old.clear()
            old.update(new)


def _failed_line(error: BaseException, test: str) -> str:
    """The test's line that failed, for a failed assert."""
    trace, number = error.__traceback__, 0
    while trace:
        if trace.tb_frame.f_code.co_filename == "<test>":
            number = trace.tb_lineno
        trace = trace.tb_next
    lines = test.splitlines()
    return f"{lines[number - 1].strip()[:160]}: " if 0 < number <= len(lines) else ""
