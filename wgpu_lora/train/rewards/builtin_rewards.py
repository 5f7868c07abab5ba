"""The built-in reward functions, called as those from files are (`reward_functions`)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.train.checks.asserts import parse_check
from wgpu_lora.train.checks.code_check import run_check
from wgpu_lora.train.checks.coding_problems import code_of

Rewards = Sequence[float | None]
RewardFunction = Callable[..., Any]
CHECK_SECONDS = 2.0  # of a completion's code
THINKING = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL)
_FENCE = re.compile(r"\A\s*```[^\n`]*\n(.*?)\n\s*```\s*\Z", re.DOTALL)
_FINAL = re.compile(r"####\s*(.+)\s*\Z")


def text_of(completion: Any) -> str:
    """The text of a completion, which may be a list of messages."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"] or "")


def answer_of(completion: Any) -> str:
    """The text behind the reasoning."""
    return text_of(completion).rpartition("</think>")[2].strip()


def final_answer(text: str) -> str:
    r"""What the last \boxed{} holds, else what follows #### at the end, else all of a text."""
    start = text.rfind(r"\boxed{")
    if start >= 0:
        depth, begin = 0, start + len(r"\boxed{")
        for end in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth < 0:
                return text[begin:end]
    match = _FINAL.search(text)
    return match[1] if match else text


def normal_form(text: str) -> str | Decimal:
    """A text without differences that do not matter: numbers by their value, white space and case of others."""
    plain = " ".join(text.split()).casefold().rstrip(".")
    try:
        number = Decimal(plain.replace(",", "").lstrip("$"))
    except InvalidOperation:
        return plain
    return number if number.is_finite() else plain


def accuracy(argument: str | None) -> RewardFunction:
    """1 for the answer in the column `answer` (or another column that is named), else 0."""
    column = argument or "answer"

    def reward(completions: Sequence[Any], **columns: Any) -> Rewards:
        return [
            None if answer is None else float(_is_equal(answer_of(completion), str(answer)))
            for completion, answer in zip(completions, columns.get(column, [None] * len(completions)), strict=True)
        ]

    return reward


def _is_equal(text: str, answer: str) -> bool:
    return normal_form(final_answer(text)) == normal_form(final_answer(answer))


def check(argument: str | None) -> RewardFunction:
    """1 if the code of the completion passes the asserts in the column `check`, in the sandbox of pass@k."""

    def passes(text: str, asserts: str | None) -> float:
        assert asserts is not None
        code = code_of(text, {name for assertion in parse_check(asserts) for name, _, _ in assertion.calls})
        return float(run_check(code, asserts, CHECK_SECONDS).passed)

    def reward(completions: Sequence[Any], check: Sequence[str | None] = (), **_: Any) -> Rewards:
        checks = check or [None] * len(completions)
        keys = [(text_of(completion), asserts) for completion, asserts in zip(completions, checks, strict=True)]
        with ThreadPoolExecutor(os.cpu_count() or 1) as checkers:  # completions of a group are often equal
            futures = {key: checkers.submit(passes, *key) for key in dict.fromkeys(keys) if key[1] is not None}
        return [futures[key].result() if key in futures else None for key in keys]

    return reward


def json_schema(argument: str | None) -> RewardFunction:
    """1 if the answer is JSON and, with a schema in a file or in the column `schema`, valid under it; else 0."""
    shared = json.loads(Path(argument).read_text(encoding="utf-8")) if argument else None
    if shared is not None:
        _validator(shared)

    def fits(completion: Any, schema: Any) -> float:
        text = answer_of(completion)
        fenced = _FENCE.match(text)
        try:
            value = json.loads(fenced[1] if fenced else text)
        except (ValueError, RecursionError):
            return 0.0
        return 1.0 if schema is None else float(_validator(schema).is_valid(value))

    def reward(completions: Sequence[Any], schema: Sequence[Any] = (), **_: Any) -> Rewards:
        schemas = [json.loads(value) if isinstance(value, str) else value for value in schema] or [None] * len(
            completions
        )
        return [
            fits(completion, shared if own is None else own)
            for completion, own in zip(completions, schemas, strict=True)
        ]

    return reward


def _validator(schema: Any) -> Any:
    try:
        from jsonschema.validators import validator_for
    except ImportError:
        raise UserError(
            "A JSON schema is checked by the library jsonschema, which is not installed: install wgpu-lora[rewards]."
        ) from None
    kind = validator_for(schema)
    kind.check_schema(schema)
    return kind(schema)


def regex(argument: str | None) -> RewardFunction:
    """1 if the pattern, or that in the column `pattern`, is found in the completion; else 0. The dot matches all."""
    shared = re.compile(argument, re.DOTALL) if argument else None

    def reward(completions: Sequence[Any], pattern: Sequence[str | None] = (), **_: Any) -> Rewards:
        patterns = [source and re.compile(source, re.DOTALL) for source in pattern] or [None] * len(completions)
        expressions = [own or shared for own in patterns]
        return [
            expression and float(bool(expression.search(text_of(text))))
            for text, expression in zip(completions, expressions, strict=True)
        ]

    return reward


def length(argument: str | None) -> RewardFunction:
    """From 1 for a completion of TOKENS tokens down to 0 for none, or for twice as many."""
    target = _number(argument, "length", "TOKENS")

    def reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> Rewards:
        return [1 - min(1.0, abs(len(ids) - target) / target) for ids in completion_ids]

    return reward


def overlong(argument: str | None) -> RewardFunction:
    """0 up to MAX - BUFFER tokens, then down to -1 at MAX (DAPO's soft overlong punishment, Yu et al. 2025)."""
    maximum, _, buffer = (argument or "").partition("/")
    last, room = _number(maximum, "overlong", "MAX/BUFFER"), _number(buffer, "overlong", "MAX/BUFFER")

    def reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> Rewards:
        return [max(-1.0, min(0.0, (last - room - len(ids)) / room)) for ids in completion_ids]

    return reward


def think_format(argument: str | None) -> RewardFunction:
    """1 if the completion begins with reasoning between <think> and </think>; else 0."""
    return lambda completions, **_: [float(bool(THINKING.match(text_of(text)))) for text in completions]


def repetition(argument: str | None) -> RewardFunction:
    """-1 times the share of groups of N words (3) that occurred before (Yeo et al. 2025)."""
    size = int(_number(argument or "3", "repetition", "N"))

    def penalty(completion: Any) -> float:
        words = text_of(completion).lower().split()
        groups = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
        return len(set(groups)) / len(groups) - 1 if groups else 0.0

    return lambda completions, **_: [penalty(completion) for completion in completions]


def _number(text: str | None, name: str, form: str) -> float:
    try:
        result = float(text or "")
        if not 0 < result < 1e9:
            raise ValueError
    except ValueError:
        raise UserError(f"The reward {name} needs a number above 0: write it as {name}:{form}.") from None
    return result


BUILT_IN: dict[str, Callable[[str | None], RewardFunction]] = {
    "accuracy": accuracy,
    "check": check,
    "json_schema": json_schema,
    "regex": regex,
    "length": length,
    "overlong": overlong,
    "think_format": think_format,
    "repetition": repetition,
}
