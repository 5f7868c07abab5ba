"""Turns of a completion in which the model calls tools, as in TRL: results are put behind them, and it goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.infer.tool_calls import ToolCallParser, tool_format
from wgpu_lora.names.spelling import flag
from wgpu_lora.rewards.tools import Tools
from wgpu_lora.tokenizer.tokenizer import Tokenizer

Message = dict[str, Any]


class ToolTurns:
    """Runs the calls in completions.

    Args:
        max_iterations: turns of a completion whose calls are run; None for any number.

    Raises:
        UserError: the chat template has no tools, or writes calls in a form that is not known.
    """

    def __init__(self, tools: Tools, tokenizer: Tokenizer | None, max_iterations: int | None):
        if tokenizer is None:
            raise UserError(f"{flag('tools')} needs a chat template, and the model has no tokenizer.json: add one.")
        self.tools, self.tokenizer, self.max_iterations = tools, tokenizer, max_iterations
        self._format = tool_format(tokenizer)
        self._calls = self._failures = 0

    def counts(self) -> tuple[int, int]:
        """Calls since the last time, and how many of them failed."""
        result = self._calls, self._failures
        self._calls = self._failures = 0
        return result

    def close(self) -> None:
        self.tools.close()

    def follow(self, turns: list[Message], token_ids: Sequence[int], stopped: bool) -> list[int]:
        """The tokens behind a turn, with the results of its calls and the header of the next one; none if it calls
        nothing, or its calls are not to be run. The messages are added to `turns`.

        Args:
            stopped: whether the last token is the stop token. A turn without one may be cut off amid a call.
        """
        ids = list(token_ids[:-1] if stopped else token_ids)
        parser = ToolCallParser(self._format)
        content, raw_calls = parser.push(self.tokenizer.decode(ids, skip_special_tokens=False), last=True)
        if not (raw_calls and stopped):
            turns.append({"role": "assistant", "content": self.tokenizer.decode(ids)})
            return []
        calls, results, values = list[Message](), list[Message](), list[Any]()
        for number, call in enumerate(raw_calls):
            values.append(_value(call["function"]["arguments"]))
            function = {
                "name": call["function"]["name"],
                "arguments": values[-1] if isinstance(values[-1], dict) else {},
            }
            # Mistral's template takes ids of nine characters, and others objects only.
            calls.append({"id": f"{number:09}", "type": "function", "function": function})
        answered = sum(turn["role"] == "assistant" for turn in turns)
        turns.append({"role": "assistant", "content": content.strip(), "tool_calls": calls})
        if self.max_iterations is not None and answered >= self.max_iterations:
            return []
        for call, arguments in zip(calls, values, strict=True):
            name = call["function"]["name"]
            text, failed = self.tools.call(name, arguments)
            self._calls, self._failures = self._calls + 1, self._failures + failed
            results.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": text})
        turns += results
        return self._behind(calls, results, self.tokenizer.decode(token_ids[-1:], skip_special_tokens=False))

    def _behind(self, calls: list[Message], results: list[Message], stop: str) -> list[int]:
        """What the chat template writes behind a turn with these calls and its stop token."""
        turn: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ]
        before = self.tokenizer.render(turn, self.tools.schemas)
        whole = self.tokenizer.render([*turn, *results], self.tools.schemas, add_generation_prompt=True)
        end = before.rfind(stop)
        before = before[: end + len(stop)] if end >= 0 else before
        if not whole.startswith(before):
            raise UserError("The chat template rewrites calls of tools once they have results: use another model.")
        return self.tokenizer.encode(whole[len(before) :])


def _value(text: str) -> Any:
    """The value of a text in JSON; None of another."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
