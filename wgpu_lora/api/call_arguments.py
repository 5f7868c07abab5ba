"""Listeners of jobs started from Python: an Events object, a plain callback, and the functions of version 0.1.0."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.events import Evaluating, Events, StepResult

# Arguments of version 0.1.0 and the Events methods that replace them; to be removed in the next version.
BEFORE = {
    "progress": "loading",
    "on_rows": "evaluating",
    "on_text": "text",
    "on_done": "answering",
    "on_answer": "answered",
}
Callback = Callable[[StepResult], bool | None]


def listeners(
    where: str, events: Events | None, options: dict[str, Any], callback: Callback | None = None
) -> tuple[Events, ...]:
    """The listeners that were given; removes the names of version 0.1.0 from `options`, with a warning.

    Raises:
        UserError: `events` is not an Events object, or `callback` is not callable.
    """
    if events is not None and not isinstance(events, Events):
        raise UserError(f"{where}: events must be an object of a class derived from Events, not {events!r:.60}.")
    if callback is not None and not callable(callback):
        raise UserError(f"{where}: callback must be a function, not {callback!r:.60}.")
    old = {name: options.pop(name) for name in BEFORE if name in options}
    functions = {name: value for name, value in {**old, "callback": callback}.items() if value is not None}
    for name in functions.keys() & BEFORE.keys():
        message = (
            f"{where}: {name} is now a method of Events: override Events.{BEFORE[name]} and pass the object as events"
        )
        warnings.warn(message, DeprecationWarning, stacklevel=3)
    return (*([events] if events else []), *([_Functions(functions)] if functions else []))


class _Functions(Events):
    """Calls plain functions by name."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]):
        self._functions = functions

    def _call(self, name: str, *values: Any) -> Any:
        return self._functions[name](*values) if name in self._functions else None

    def step(self, result: StepResult) -> bool | None:
        return bool(self._call("callback", result) is True)

    def loading(self, model: str, tensor: str, done: int, total: int) -> None:
        self._call("progress", tensor)

    def evaluating(self, evaluating: Evaluating) -> None:
        if evaluating.step is None:
            self._call("on_rows", evaluating.rows, evaluating.total)

    def text(self, piece: str) -> None:
        self._call("on_text", piece)

    def answering(self, done: int, total: int, tokens: int) -> None:
        self._call("on_done", tokens)

    def answered(self, number: int, name: str | None, answer: Any) -> None:
        self._call("on_answer", number, answer)


def path_as_text(value: Any, name: str, where: str) -> Any:
    """Convert a path to text.

    Raises:
        UserError: the value is an empty text.
    """
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str) and not value.strip():
        raise UserError(f"{where}: '{name}' is empty: give it a value, or leave it out.")
    return value
