"""The held-out data of a proof: whether they are in the training data, and what their rows ask."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wgpu_lora.data import parse_example, read_examples
from wgpu_lora.data.example_formats import EXAMPLES
from wgpu_lora.data.row_files import file_source
from wgpu_lora.data.source import strict_rows
from wgpu_lora.tokenizer.examples import Conversation, Example

SAID = ("role", "content", "tool_calls")  # of a message


def count_leaked_rows(train: Path, heldout: Path) -> tuple[int, int]:
    """(rows of `heldout` with the content of a row of `train`, rows of `heldout`).

    Raises:
        UserError: a file cannot be read.
    """
    known = {content(example) for _, example in read_examples(file_source(train))}
    held = [content(example) in known for _, example in read_examples(file_source(heldout))]
    return sum(held), len(held)


def rows_of(path: str) -> dict[str, dict[str, Any]]:
    """The rows of a file by their places, such as 'data.jsonl, line 3'. Raises UserError if one cannot be read."""
    source = file_source(Path(path))
    return {source.locate(place): row for place, row in strict_rows(source, EXAMPLES)}


def content(example: Example) -> str:
    """The text of a row with normalised white space, without its labels."""
    if isinstance(example, Conversation):
        plain: Any = [{name: message.get(name) for name in SAID} for message in example.messages]
    else:
        plain = {name: value for name, value in asdict(example).items() if name != "labels"}
    return json.dumps(_plain(plain), sort_keys=True)


def _plain(said: Any) -> Any:
    if isinstance(said, str):
        return " ".join(said.split())
    if isinstance(said, dict):
        return {name: _plain(value) for name, value in said.items()}
    return [_plain(value) for value in said] if isinstance(said, list) else said


def request_of(row: dict[str, Any]) -> Conversation | None:
    """The messages before the last assistant turn; None if there are none, or the row is not a conversation.

    Raises:
        UserError: the row fits no format.
    """
    example = parse_example(row)
    if not isinstance(example, Conversation):
        return None
    turns = [i for i, message in enumerate(example.messages) if message["role"] == "assistant"]
    before = example.messages[: turns[-1]] if turns else []
    return Conversation(before, frozenset(), example.tools, example.template_kwargs) if before else None


def shown(request: Conversation) -> str:
    """A request as text, without the role if it is a single message of the user."""
    messages = request.messages
    if len(messages) == 1 and messages[0]["role"] == "user":
        return str(messages[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)
