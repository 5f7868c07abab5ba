"""The process that reward functions and tools run in: functions of the user's own are trusted, but may fail or hang."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import math
import os
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter, validate_call

from wgpu_lora.errors import UserError
from wgpu_lora.rewards.builtin_rewards import BUILT_IN
from wgpu_lora.text import count_noun

FILE = ".py"
LONGEST = 100_000  # characters of a tool's result


def main() -> None:
    """Answer each line of JSON on standard input with one. What functions print goes to standard error.

    A line has the `function` to load and, to call it, the `arguments` of a reward function or the `call` of a tool;
    with `schema`, the answer has a tool's description and parameters.
    """
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    functions: dict[str, Callable[..., Any]] = {}
    messages = queue.SimpleQueue[bytes]()
    threading.Thread(target=_read, args=(source, messages), daemon=True).start()
    while True:
        message = json.loads(messages.get())
        try:
            if message["function"] not in functions:
                functions[message["function"]] = load(message["function"])
            reply = _reply(functions[message["function"]], message)
        except UserError as error:
            reply = {"error": str(error)}
        except (Exception, SystemExit) as error:
            text = " ".join(str(error).partition("\n    For further information")[0].split())
            reply = {"error": f"{type(error).__name__}: {text:.300}" if text else type(error).__name__}
        sink.write(json.dumps(reply).encode() + b"\n")
        sink.flush()


def _read(source: IO[bytes], messages: queue.SimpleQueue[bytes]) -> None:
    """Pass lines on to their end, which ends the process, also while a function runs: the parent is gone."""
    for line in source:
        messages.put(line)
    os._exit(0)


def load(name: str) -> Callable[..., Any]:
    """The function FILE.py:NAME, or a built-in one, as NAME or NAME:ARGUMENT. Raises UserError."""
    before, colon, after = name.partition(FILE + ":")
    if not colon:
        kind, _, argument = name.partition(":")
        return BUILT_IN[kind](argument or None)
    path = Path(before + FILE).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    function = getattr(module, after, None)
    if not callable(function):
        raise UserError(f"{path.name} has no function {after!r:.80}")
    return function  # type: ignore[no-any-return]


def _reply(function: Callable[..., Any], message: dict[str, Any]) -> dict[str, Any]:
    if "arguments" in message:
        return _scored(_result(function(**message["arguments"])), len(message["arguments"]["completions"]))
    if "call" in message:
        text = str(_result(validate_call(function)(**message["call"])))
        if len(text) > LONGEST:
            raise UserError(f"it returned {count_noun(len(text), 'character')}, more than {LONGEST:,}")
        return {"result": text.encode(errors="replace").decode()}  # half of a surrogate pair has no tokens
    if "schema" in message:
        adapter: TypeAdapter[Any] = TypeAdapter(function)  # type: ignore[arg-type]
        return {"description": inspect.getdoc(function) or "", "parameters": adapter.json_schema()}
    return {}


def _result(value: Any) -> Any:
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _scored(rewards: Any, count: int) -> dict[str, Any]:
    rewards = list(rewards)
    if len(rewards) != count:
        raise UserError(f"it gave {count_noun(len(rewards), 'reward')} for {count_noun(count, 'completion')}")
    values = [None if reward is None else float(reward) for reward in rewards]
    wrong = [value is not None and not math.isfinite(value) for value in values]
    return {"rewards": [None if bad else v for v, bad in zip(values, wrong, strict=True)], "wrong": sum(wrong)}
