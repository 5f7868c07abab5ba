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
import traceback
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any

from pydantic import TypeAdapter, ValidationError, validate_call

from wgpu_lora.errors import UserError
from wgpu_lora.names.text import count_noun
from wgpu_lora.train.rewards.builtin_rewards import BUILT_IN

FILE = ".py"
LONGEST = 100_000  # characters of a tool's result
RESERVED = ("step", "epoch", "loss", "learning_rate", "grad_norm")  # keys of the log that no function may set


def main() -> None:
    """Answer each line of JSON on standard input with one. What functions print goes to standard error.

    A line has its `number`, which its answer has, too, the `function` to load and, to call it, the `arguments` of a
    reward function and the trainer's `state`, or the `call` of a tool; with `schema`, the answer has a tool's
    description and parameters. All coroutines run in one event loop, since clients and semaphores belong to the one
    that they are first used in.
    """
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    functions: dict[str, Callable[..., Any]] = {}
    failed, loop = set[str](), asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    messages = queue.SimpleQueue[bytes]()
    threading.Thread(target=_read, args=(source, messages), daemon=True).start()
    while True:
        message = json.loads(messages.get())
        try:
            if message["function"] not in functions:
                functions[message["function"]] = load(message["function"])
            reply = _reply(functions[message["function"]], message, loop)
        except UserError as error:
            reply = {"error": str(error)}
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if message.keys() & {"arguments", "call"} and not isinstance(error, ValidationError):
                if message["function"] not in failed:
                    traceback.print_exc()  # once
                failed.add(message["function"])
            text = " ".join(str(error).partition("\n    For further information")[0].split())
            reply = {"error": f"{type(error).__name__}: {text:.300}" if text else type(error).__name__}
        sink.write(json.dumps({**reply, "number": message["number"]}).encode() + b"\n")
        sink.flush()


def _read(source: IO[bytes], messages: queue.SimpleQueue[bytes]) -> None:
    """Pass lines on to their end, which ends the process, also while a function runs: the parent is gone."""
    for line in source:
        messages.put(line)
    os._exit(0)


def load(name: str) -> Callable[..., Any]:
    """The function FILE.py:NAME, or a built-in one, as NAME or NAME:ARGUMENT. Raises UserError."""
    kind, _, argument = name.partition(":")
    if kind in BUILT_IN:
        return BUILT_IN[kind](argument or None)
    before, _, after = name.partition(FILE + ":")
    path = Path(before + FILE).resolve()
    function = getattr(_module(path), after, None)
    if not callable(function):
        raise UserError(f"{path.name} has no function {after!r:.80}")
    return function  # type: ignore[no-any-return]


@cache
def _module(path: Path) -> ModuleType:
    """A file's module, which all of its functions share."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _reply(function: Callable[..., Any], message: dict[str, Any], loop: asyncio.AbstractEventLoop) -> dict[str, Any]:
    def result(value: Any) -> Any:
        return loop.run_until_complete(value) if inspect.isawaitable(value) else value

    if "arguments" in message:
        return _rewards(lambda **arguments: result(function(**arguments)), inspect.signature(function), message)
    if "call" in message:
        text = str(result(validate_call(function)(**message["call"])))
        if len(text) > LONGEST:
            raise UserError(f"it returned {count_noun(len(text), 'character')}, more than {LONGEST:,}")
        return {"result": text.encode(errors="replace").decode()}  # half of a surrogate pair has no tokens
    if "schema" in message:
        adapter: TypeAdapter[Any] = TypeAdapter(function)  # type: ignore[arg-type]
        return {"description": inspect.getdoc(function) or "", "parameters": adapter.json_schema()}
    return {}


def _rewards(call: Callable[..., Any], signature: inspect.Signature, message: dict[str, Any]) -> dict[str, Any]:
    """What a reward function gives and logs. As in TRL, it may take `trainer_state`, `log_metric` and `log_extra`."""
    metrics, extra = defaultdict[str, list[float]](list), defaultdict[str, list[Any]](list)

    def log_metric(name: str, value: float) -> None:
        if name in RESERVED or name.startswith("eval_"):
            raise UserError(f"log_metric was given {name!r:.80}, a name of the log's own")
        metrics[name].append(float(value))

    def log_extra(column: str, values: list[Any]) -> None:
        extra[str(column)].extend(json.loads(json.dumps(values, default=str)))

    further = {
        "trainer_state": SimpleNamespace(**message["state"]), "log_metric": log_metric, "log_extra": log_extra
    }  # fmt: skip
    parameters = signature.parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        further = {name: value for name, value in further.items() if name in signature.parameters}
    count = len(message["arguments"]["completions"])
    rewards = _scored(call(**{**message["arguments"], **further}), count)
    for column, values in extra.items():
        if len(values) != count:
            raise UserError(f"log_extra was given {len(values):,} values of {column!r:.80} for {count:,} completions")
    return {**rewards, "metrics": metrics, "extra": extra}


def _scored(rewards: Any, count: int) -> dict[str, Any]:
    rewards = list(rewards)
    if len(rewards) != count:
        raise UserError(f"it gave {count_noun(len(rewards), 'reward')} for {count_noun(count, 'completion')}")
    values = [None if reward is None else float(reward) for reward in rewards]
    wrong = [value is not None and not math.isfinite(value) for value in values]
    return {"rewards": [None if bad else v for v, bad in zip(values, wrong, strict=True)], "wrong": sum(wrong)}
