"""The conversations of a chat, and how much of them fits into a prompt; no device and no terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wgpu_lora.data import Tokenizer, read_jsonl
from wgpu_lora.data.examples import CHAT, Conversation
from wgpu_lora.data.formats import parse_example
from wgpu_lora.errors import UserError
from wgpu_lora.infer.prompt import chat_prompt, check_text
from wgpu_lora.infer.settings import Settings
from wgpu_lora.names.naming import flag

Message = dict[str, Any]
ROOM = 4  # 1/4 of the tokens is reserved for the answer, or max_new_tokens if that is less


@dataclass
class Lane:
    """A conversation with one adapter, or with the base model.

    messages: of the user and the assistant, alternating, without a system message.
    first: index of the oldest message that is still in the prompt.
    """

    name: str
    messages: list[Message] = field(default_factory=list)
    first: int = 0

    def joined(self, name: str) -> Lane:
        """A copy of the conversation for another adapter."""
        return Lane(name, [*self.messages], self.first)

    def add(self, text: str, answer: str) -> None:
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def undo(self) -> str | None:
        """Remove the last turn and return the user's message; None if there is none."""
        places = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not places:
            return None
        text = self.messages[places[-1]]["content"]
        del self.messages[places[-1] :]
        self.first = 0
        return str(text)

    def prompt(self, tokenizer: Tokenizer, text: str, settings: Settings, capacity: int) -> tuple[list[int], int]:
        """Token ids of the prompt for an answer to `text`, and the number of turns newly left out of it.

        The oldest turns are left out if the answer would not have enough room. Without a chat template, or if
        the settings have another prompt format, the prompt is `text` alone.

        Raises:
            UserError: the text alone has too many tokens, or the template rejects the conversation.
        """
        check_text("message", text)
        templated = tokenizer.has_chat_template and settings.prompt_format in (None, CHAT)
        room = min(settings.max_new_tokens, max(1, capacity // ROOM))
        first, left_out = self.first, 0
        while True:
            said = [*self.messages[first:], {"role": "user", "content": text}]
            shown: Any = said if templated else text
            ids = chat_prompt(tokenizer, shown, settings.system, settings.prompt_format, **settings.template_kwargs)
            turns = [i for i, m in enumerate(self.messages) if m["role"] == "user" and i >= first]
            if len(ids) + room <= capacity or not turns or not templated:
                break
            first = turns[1] if len(turns) > 1 else len(self.messages)
            left_out += 1
        if len(ids) < capacity:
            self.first = first
            return ids, left_out
        raise UserError(
            f"The message takes {len(ids):,} tokens, but the conversation holds {capacity:,}: shorten it, or start "
            f"with a larger {flag('max_length')}."
        )


def rows_of(lanes: Iterable[Lane], system: str | None, templated: bool) -> list[dict[str, Any]]:
    """Rows to train on: a conversation per lane or, without a chat template, a prompt and completion per turn."""
    rows: list[dict[str, Any]] = []
    every = [lane for lane in lanes if lane.messages]
    for lane in every:
        who = {"adapter": lane.name} if len(every) > 1 else {}
        if templated:
            before = [{"role": "system", "content": system}] if system is not None else []
            rows.append({"messages": [*before, *lane.messages], **who})
        else:
            pairs = zip(lane.messages[::2], lane.messages[1::2], strict=True)
            rows += [{"prompt": asked["content"], "completion": said["content"], **who} for asked, said in pairs]
    return rows


def to_jsonl(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def read_conversations(path: Path) -> list[tuple[str | None, list[Message]]]:
    """(system message, other messages) of every row of a JSONL file.

    Raises:
        UserError: the file cannot be read, or a row is not a conversation.
    """
    found: list[tuple[str | None, list[Message]]] = []
    for number, row in read_jsonl(path):
        try:
            example = parse_example(row)
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
        if not isinstance(example, Conversation):
            raise UserError(f"{path}, line {number}: the row has no messages.")
        messages = [{**message} for message in example.messages]
        system = messages.pop(0)["content"] if messages[0]["role"] == "system" else None
        found.append((system, messages))
    return found
