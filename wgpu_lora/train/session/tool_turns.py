"""Turns of a completion in which the model calls tools, as in TRL: results are put behind them, and it goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.formats.tokenizer.tokenizer import Tokenizer
from wgpu_lora.infer.tool_calls import QUESTION, TRIAL, ToolCallParser, rendered_call, tool_format
from wgpu_lora.names.spelling import flag
from wgpu_lora.names.text import common_prefix
from wgpu_lora.train.rewards.function_process import Tools

Message = dict[str, Any]


class ToolTurns:
    """Runs the calls in completions.

    Args:
        max_iterations: turns of a completion whose calls are run; None for any number.
        variables: of the chat template, as the run's prompts are rendered.

    Raises:
        UserError: the chat template has no tools, writes calls in a form that is not known, or takes no results.
    """

    def __init__(
        self,
        tools: Tools,
        tokenizer: Tokenizer | None,
        max_iterations: int | None,
        variables: Mapping[str, Any] | None = None,
    ):
        if tokenizer is None:
            raise UserError(f"{flag('tools')} needs a chat template, and the model has no tokenizer.json: add one.")
        self.tools, self.tokenizer, self.max_iterations = tools, tokenizer, max_iterations
        self.variables = dict(variables or {})
        self._format = tool_format(tokenizer, tools.schemas, variables)
        self._end = self._turn_end()
        self._behind([_result(TRIAL, "?")], self.variables)  # a template that takes none is refused before sampling
        self._calls = self._failures = 0

    def _turn_end(self) -> str:
        """What the chat template writes behind an assistant's turn, up to the stop token."""
        _, end = rendered_call(self.tokenizer, self.tools.schemas, self.variables)
        stops = (self.tokenizer.decode([id], skip_special_tokens=False) for id in self.tokenizer.stop_ids)
        return end[: min((at + len(stop) for stop in stops if stop and (at := end.find(stop)) >= 0), default=len(end))]

    def counts(self) -> tuple[int, int]:
        """Calls since the last time, and how many of them failed."""
        result = self._calls, self._failures
        self._calls = self._failures = 0
        return result

    def close(self) -> None:
        self.tools.close()

    def follow(
        self, turns: list[Message], token_ids: Sequence[int], stopped: bool, variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """The tokens behind a turn, with the results of its calls and the header of the next one; none if it calls
        nothing, or its calls are not to be run. The messages are added to `turns`.

        Args:
            stopped: whether the last token is the stop token. A turn without one may be cut off amid a call.
            variables: of the chat template, of the prompt's own row.
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
            results.append(_result(call, text))
        turns += results
        return self._behind(results, {**self.variables, **(variables or {})})

    def _behind(self, results: list[Message], variables: Mapping[str, Any]) -> list[int]:
        """What the chat template writes behind the stop token of a turn that calls tools.

        That is found by what renderings with other results have in common, since templates may write the turn itself
        in another way than the model did: Qwen3's writes thoughts that are not there.
        """
        name = results[0]["name"]
        call = {**TRIAL, "id": results[0]["tool_call_id"], "function": {"name": name, "arguments": {}}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}  # one, as in TRL: some templates take no more
        other = {**results[0], "content": "!" if results[0]["content"].startswith("?") else "?"}
        prompt, whole, changed = (
            self.tokenizer.render([QUESTION, *messages], self.tools.schemas, True, variables)
            for messages in ([], [turn, *results], [turn, other, *results[1:]])
        )
        begin = len(common_prefix(prompt, whole))
        at = common_prefix(whole, changed).rfind(self._end, begin)
        if at < 0 or whole == changed or not self._end.strip():
            raise UserError(
                "The chat template does not write results of tools behind the stop token of a turn: use another model."
            )
        return self.tokenizer.encode(whole[at + len(self._end) :])


def _result(call: Message, text: str) -> Message:
    return {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}


def _value(text: str) -> Any:
    """The value of a text in JSON; None of another."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
