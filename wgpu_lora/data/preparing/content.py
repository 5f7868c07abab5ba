"""What makes two rows duplicates: the same content, exactly or after normalising, whatever their format."""

from __future__ import annotations

import hashlib
import json
import re
from unicodedata import normalize

from wgpu_lora.data.examples import Alpaca, Completion, Conversation, Example, Text
from wgpu_lora.data.preparing.kinds import Read

_WORD = re.compile(r"\w+")
SHINGLE = 3  # words


def parts_of(read: Read) -> list[str]:
    """The texts that a row consists of. Other columns, such as an id, are not part of its content."""
    parts = [read.kind, str(read.sample.value)]
    for example in read.sample.examples:
        parts += _parts(example)
    return parts


def _parts(example: Example) -> list[str]:
    match example:
        case Conversation():
            return _conversation(example)
        case Alpaca():
            said = [*example.asked, {"role": "assistant", "content": example.output}]
            return _conversation(Conversation(said, frozenset({len(said) - 1})))
        case Completion():
            return ["completion", example.prompt, example.completion]
        case Text():
            return ["text", example.text]
        case _:
            return ["tokens", str(example.input_ids), str(example.labels)]


def _conversation(example: Conversation) -> list[str]:
    parts = ["conversation"]
    for i, message in enumerate(example.messages):
        others = {k: v for k, v in message.items() if k not in ("role", "content", "weight") and v is not None}
        parts += [message["role"], "trained" if i in example.trained else "", message["content"] or ""]
        if others:
            parts.append(json.dumps(others, sort_keys=True, default=repr))
    if example.tools or example.template_kwargs:
        parts.append(json.dumps([example.tools, example.template_kwargs], sort_keys=True, default=repr))
    return parts


def normal(text: str) -> str:
    """A text without differences in case, white space and Unicode composition (NFC)."""
    if text.isascii():
        return " ".join(text.lower().split())
    return " ".join(normalize("NFC", normalize("NFD", text).casefold()).split())


def digest(parts: list[str], size: int = 16) -> bytes:
    """A digest of texts, whose lengths tell where each ends."""
    text = "".join([f"{len(part)}:{part}" for part in parts])
    return hashlib.blake2b(text.encode(), digest_size=size).digest()


def shingles(parts: list[str]) -> list[str]:
    """The runs of SHINGLE words in normalised texts, which near duplicates share."""
    words = [word for part in parts for word in _WORD.findall(part)]
    if len(words) < SHINGLE:
        return [" ".join(words)]
    return [" ".join(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)]
