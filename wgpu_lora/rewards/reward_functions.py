"""The reward functions of a run: their names and weights, and what they give for completions."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from wgpu_lora.assets import ROOT
from wgpu_lora.child_process import PATIENCE, ChildEnded, ChildProcess
from wgpu_lora.errors import UserError
from wgpu_lora.names.spelling import flag
from wgpu_lora.rewards.builtin_rewards import BUILT_IN
from wgpu_lora.rewards.reward_child import FILE

START = 60.0  # seconds to import a function's file
_COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from wgpu_lora.rewards.reward_child import main; main()"
)


@dataclass(frozen=True)
class Rewards:
    """What functions give for completions.

    values: f64 [completions, functions], NaN for none. failed: completions that a function failed on, by its name.
    reasons: of the last failure, by name.
    """

    values: np.ndarray
    failed: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


class RewardFunctions:
    """Functions that score completions, as in TRL: called with `prompts`, `completions`, `completion_ids` and the rows'
    other columns, each a list with an entry for each completion, they return a list of numbers or None.

    They run in a child process that is started when it is needed, and ended when one takes too long.

    Args:
        functions: separated by commas: FILE.py:NAME, or a built-in one as NAME or NAME:ARGUMENT.
        weights: numbers separated by commas, one for each; by default 1 each.
        seconds: that a call may take.

    Raises:
        UserError: a file or a name is unknown, or the weights do not match.
    """

    def __init__(self, functions: str, weights: str | None = None, seconds: float = 60.0):
        self.functions = [part.strip() for part in functions.split(",") if part.strip()]
        self.seconds = seconds
        self.names = [_name(function) for function in self.functions]
        if not self.names:
            raise UserError(f"{flag('reward_funcs')} is empty: name at least one function.")
        for name in self.names:
            if self.names.count(name) > 1:
                raise UserError(f"{flag('reward_funcs')} has two functions named {name!r:.80}: rename one of them.")
        self.weights = _weights(weights, len(self.names))
        self._child: ChildProcess | None = None
        self._loaded: set[str] = set()  # functions that the child has

    def load(self) -> None:
        """Load all functions. Raises UserError if one cannot be."""
        for function in self.functions:
            reply = self._ask({"function": function}, START)
            if "error" in reply:
                raise UserError(
                    f"{flag('reward_funcs')}: {function:.200} cannot be loaded ({reply['error'].removesuffix('.')}): "
                    "correct it."
                )

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Sequence[Mapping[str, Any]],
    ) -> Rewards:
        """The rewards of completions. A function that fails gives none; that is counted, and no error.

        Args:
            prompts: texts or messages, one for each completion. columns: of its row.
        """
        given = {"prompts", "completions", "completion_ids", "prompt", "completion", "prompt_ids"}
        names = {name for row in columns for name in row} - given
        arguments: dict[str, Any] = {name: [row.get(name) for row in columns] for name in sorted(names)}
        arguments |= {"prompts": list(prompts), "completions": list(completions)}
        arguments["completion_ids"] = [list(ids) for ids in completion_ids]
        arguments = json.loads(
            json.dumps(arguments, default=str)
        )  # tables have values that JSON has not, such as dates
        values = np.full((len(completions), len(self.functions)), np.nan)
        failed, reasons = dict[str, int](), dict[str, str]()
        for number, (name, function) in enumerate(zip(self.names, self.functions, strict=True)):
            reply = self._ask({"function": function, "arguments": arguments}, self.seconds)
            rewards = reply.get("rewards", [None] * len(completions))
            values[:, number] = [np.nan if reward is None else reward for reward in rewards]
            wrong = len(completions) if "error" in reply else reply["wrong"]
            if wrong:
                failed[name], reasons[name] = wrong, reply.get("error", "it gave a number that is not finite")
        return Rewards(values, failed, reasons)

    def _ask(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The child's answer; the start of the child and the import of the function have a time of their own."""
        if self._child is None or not self._child.running:
            self._child, self._loaded = None, set()
        if message["function"] not in self._loaded:
            reply = self._answer({"function": message["function"]}, START)
            if "error" in reply:
                return reply
            self._loaded.add(message["function"])
        return self._answer(message, seconds) if "arguments" in message else {}

    def _answer(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        begin = time.monotonic()
        try:
            if self._child is None:
                paths = json.dumps([*sys.path, str(ROOT)])
                self._child = ChildProcess([sys.executable, "-c", _COMMAND, paths], stderr=2)
            with self._child.within(seconds / PATIENCE):
                self._child.send(message)
                reply: dict[str, Any] = self._child.receive()
                return reply
        except ChildEnded as error:
            late = time.monotonic() - begin >= seconds
            return {"error": f"it took more than {seconds:g} seconds" if late else str(error)}

    def close(self) -> None:
        if self._child:
            self._child.end()
            self._child = None


def _name(function: str) -> str:
    """The name of a function, for logs. Raises UserError if it can be none."""
    before, colon, name = function.partition(FILE + ":")
    if colon:
        if not Path(before + FILE).is_file():
            raise UserError(f"{flag('reward_funcs')}: there is no file {before + FILE!s:.200}: correct the path.")
        if not name.isidentifier():
            raise UserError(f"{flag('reward_funcs')}: {name!r:.80} is not the name of a function: give FILE.py:NAME.")
        return name
    kind = function.partition(":")[0]
    if kind not in BUILT_IN:
        raise UserError(
            f"{flag('reward_funcs')} has no built-in {kind!r:.80}: give FILE.py:NAME, or one of {', '.join(BUILT_IN)}."
        )
    return kind


def _weights(text: str | None, count: int) -> np.ndarray:
    try:
        result = np.array([float(part) for part in text.split(",")] if text else [1.0] * count)
        if len(result) != count or not np.isfinite(result).all():
            raise ValueError
    except ValueError:
        raise UserError(
            f"{flag('reward_weights')} must be {count} numbers with commas, one for each function, not {text!r:.80}."
        ) from None
    return result
