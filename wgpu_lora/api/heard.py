"""Who hears of a job that is started from Python: a listener, a plain callback, and the functions of version 0.1.0."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.events import Evaluating, Events, StepResult

# What version 0.1.0 called what is a method of Events now; to be removed in the version after this one.
BEFORE = {
    "progress": "loading",
    "on_rows": "evaluating",
    "on_text": "text",
    "on_done": "answering",
    "on_answer": "answered",
}
Callback = Callable[[StepResult], bool | None]


def heard(
    where: str, events: Events | None, options: dict[str, Any], callback: Callback | None = None
) -> tuple[Events, ...]:
    """The listeners that were given; takes the names of version 0.1.0 out of `options`, with a note.

    Raises:
        UserError: `events` is no Events, or `callback` no function.
    """
    if events is not None and not isinstance(events, Events):
        raise UserError(f"{where}: events must be an object of a class derived from Events, not {events!r:.60}.")
    if callback is not None and not callable(callback):
        raise UserError(f"{where}: callback must be a function, not {callback!r:.60}.")
    old = {name: options.pop(name) for name in BEFORE if name in options}
    functions = {name: value for name, value in {**old, "callback": callback}.items() if value is not None}
    for name in functions.keys() & BEFORE.keys():
        message = (
            f"{where}: {name} is a method of an Events object now: override Events.{BEFORE[name]} and give it as events"
        )
        warnings.warn(message, DeprecationWarning, stacklevel=3)
    return (*([events] if events else []), *([_Functions(functions)] if functions else []))


class _Functions(Events):
    """Calls plain functions by their names."""

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
