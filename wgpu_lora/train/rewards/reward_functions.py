"""The reward functions of a run: their names and weights, and what they give for completions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from statistics import fmean
from typing import Any

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.names.spelling import flag
from wgpu_lora.train.rewards.builtin_rewards import BUILT_IN
from wgpu_lora.train.rewards.function_child import FILE
from wgpu_lora.train.rewards.function_process import FunctionProcess, check_distinct, function_list, function_name

OPTION = "reward_funcs"


@dataclass(frozen=True)
class Rewards:
    """What functions give for completions.

    values: f64 [completions, functions], NaN for none. failed: completions that a function failed on, by its name.
    reasons: of the last failure, by name. metrics: means of what functions logged. extra: what they logged of each
    completion, by column.
    """

    values: np.ndarray
    failed: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)


class RewardFunctions:
    """Functions that score completions, as in TRL: called with `prompts`, `completions`, `completion_ids` and the rows'
    other columns, each a list with an entry for each completion, they return a list of numbers or None.

    They run in a child process (`FunctionProcess`).

    Args:
        functions: separated by commas: FILE.py:NAME, or a built-in one as NAME or NAME:ARGUMENT; the pattern of regex
            may have commas.
        weights: numbers separated by commas, one for each; by default 1 each.
        seconds: that a call may take. process: that they run in; by default, one of their own.

    Raises:
        UserError: a file or a name is unknown, or the weights do not match.
    """

    def __init__(
        self, functions: str, weights: str | None = None, seconds: float = 60.0, process: FunctionProcess | None = None
    ):
        self.functions = function_list(_parts(functions), OPTION)
        self.names = [_name(function) for function in self.functions]
        check_distinct(self.names, OPTION)
        self.weights = _weights(weights, len(self.names))
        self._process = process or FunctionProcess(seconds)

    def load(self) -> None:
        """Load all functions. Raises UserError if one cannot be."""
        for function in self.functions:
            self._process.load(function, OPTION)

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Sequence[Mapping[str, Any]],
        state: Mapping[str, Any] | None = None,
    ) -> Rewards:
        """The rewards of completions. A function that fails gives none; that is counted, and no error.

        Args:
            prompts: texts or messages, one for each completion. columns: of its row.
            state: attributes of the `trainer_state` that functions may take.
        """
        standard_names = {"prompts", "completions", "completion_ids", "prompt", "completion", "prompt_ids"}
        names = {name for row in columns for name in row} - standard_names
        arguments: dict[str, Any] = {name: [row.get(name) for row in columns] for name in sorted(names)}
        arguments |= {"prompts": list(prompts), "completions": list(completions)}
        arguments["completion_ids"] = [list(ids) for ids in completion_ids]
        arguments = json.loads(
            json.dumps(arguments, default=str)
        )  # tables have values that JSON has not, such as dates
        values = np.full((len(completions), len(self.functions)), np.nan)
        failed, reasons = dict[str, int](), dict[str, str]()
        metrics, extra = dict[str, list[float]](), dict[str, list[Any]]()
        for number, (name, function) in enumerate(zip(self.names, self.functions, strict=True)):
            reply = self._process.ask(function, arguments=arguments, state=dict(state or {}))
            rewards = reply.get("rewards", [None] * len(completions))
            values[:, number] = [np.nan if reward is None else reward for reward in rewards]
            wrong = len(completions) if "error" in reply else reply["wrong"]
            if wrong:
                failed[name], reasons[name] = wrong, reply.get("error", "it gave a number that is not finite")
            extra |= reply.get("extra", {})
            for metric, logged in reply.get("metrics", {}).items():
                metrics[metric] = metrics.get(metric, []) + logged
        return Rewards(values, failed, reasons, {name: fmean(logged) for name, logged in metrics.items()}, extra)

    def close(self) -> None:
        self._process.close()


def _parts(functions: str) -> list[str]:
    """What an option names, between commas other than those of a pattern of regex, which ends where a function does.

    Raises:
        UserError: a part of a pattern is nearly the name of a function.
    """
    result = list[str]()
    for part in functions.split(","):
        name = part.strip().partition(":")[0]
        is_function = FILE + ":" in part or name in BUILT_IN
        if result and not is_function and result[-1].lstrip().startswith("regex:"):
            if similar := get_close_matches(name, BUILT_IN, 1, 0.8):
                raise UserError(
                    f"{flag(OPTION)} has {name!r:.80} behind a pattern of regex: write {similar[0]}, or put it into "
                    "brackets if it belongs to the pattern."
                )
            result[-1] += f",{part}"
        else:
            result.append(part)
    return result


def _name(function: str) -> str:
    """The name of a function, for logs. Raises UserError if it can be none."""
    kind = function.partition(":")[0]
    if kind in BUILT_IN:
        return kind
    name = function_name(function, OPTION)
    if name is None:
        raise UserError(
            f"{flag(OPTION)} has no built-in {kind!r:.80}: give FILE.py:NAME, or one of {', '.join(BUILT_IN)}."
        )
    return name


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
