"""The held-out data of a proof: whether training has seen them, and what their rows ask."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wgpu_lora.data import parse_example, read_examples
from wgpu_lora.data.examples import Conversation, Example
from wgpu_lora.data.files import file_source
from wgpu_lora.data.formats import EXAMPLES
from wgpu_lora.data.source import strict_rows

UNSEEN = {"labels", "trained", "template_kwargs"}  # of an example: how it is learnt, not what it says
SAID = ("role", "content", "tool_calls")


def seen_rows(train: Path, heldout: Path) -> tuple[int, int]:
    """(rows of `heldout` that say what a row of `train` says, rows of `heldout`).

    Raises:
        UserError: a file cannot be read.
    """
    known = {digest(example) for _, example in read_examples(file_source(train))}
    held = [digest(example) in known for _, example in read_examples(file_source(heldout))]
    return sum(held), len(held)


def rows_of(path: str) -> dict[str, dict[str, Any]]:
    """The rows of a file by their places, such as 'data.jsonl, line 3'. Raises UserError if one cannot be read."""
    source = file_source(Path(path))
    return {source.where(place): row for place, row in strict_rows(source, EXAMPLES)}


def digest(example: Example) -> bytes:
    """A digest of what a row says, with white space normalised."""
    if isinstance(example, Conversation):
        said: Any = [{name: message.get(name) for name in SAID} for message in example.messages]
    else:
        said = {name: value for name, value in asdict(example).items() if name not in UNSEEN}
    return hashlib.sha256(" ".join(json.dumps(_plain(said), sort_keys=True).split()).encode()).digest()


def _plain(said: Any) -> Any:
    if isinstance(said, str):
        return " ".join(said.split())
    if isinstance(said, dict):
        return {name: _plain(value) for name, value in said.items()}
    return [_plain(value) for value in said] if isinstance(said, list) else said


def request_of(row: dict[str, Any]) -> Conversation | None:
    """The messages before the last assistant turn; None if the row is no conversation or begins with that turn.

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
    """A request as text; a single message of the user alone."""
    messages = request.messages
    if len(messages) == 1 and messages[0]["role"] == "user":
        return str(messages[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)
