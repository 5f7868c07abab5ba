"""The child process of tokenizer_process.py: the library, the chat templates, and examples to ids and labels."""

from __future__ import annotations

import json
from array import array
from base64 import b64encode
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.formats.tokenizer import chat_template
from wgpu_lora.formats.tokenizer.examples import example_of
from wgpu_lora.formats.tokenizer.label_mask import tokenize
from wgpu_lora.formats.tokenizer.local_tokenizer import LocalTokenizer
from wgpu_lora.formats.tokenizer.tokenizer import Tokenizer
from wgpu_lora.formats.tokenizer.tokenizer_json import TokenizerError
from wgpu_lora.formats.tokenizer.tokenizer_process import PACKED
from wgpu_lora.processes.child_process import serve

_opened: list[LocalTokenizer] = []


@lru_cache(maxsize=4)
def _tokenizer(settings: str) -> Tokenizer:
    return Tokenizer(_opened[0], **json.loads(settings))


def _packed(numbers: Sequence[int]) -> str:
    return b64encode(array("i", numbers)).decode()


def _value(method: str, arguments: list[Any]) -> Any:
    """The value of a method: of `open`, `tokenize` (an answer for each example), `example`, or `LocalTokenizer`'s."""
    if method == "open":
        _opened.append(LocalTokenizer.open(*arguments))
        return asdict(_opened[0].info)
    if method == "tokenize":
        settings, texts, *options = arguments
        return [answer(["example", settings, text, *options]) for text in texts]
    if method == "example":
        settings, text, *options = arguments
        result = tokenize(example_of(text), _tokenizer(settings), *options)
        pairs = [[_packed(ids), _packed(labels)] for ids, labels in result.pairs]
        return [pairs, sorted(result.unrendered), result.untrained_turns, sorted(result.remarks)]
    value = _opened[0].call(method, *arguments)
    return [_packed(numbers) for numbers in value] if method in PACKED else value


def answer(request: list[Any]) -> dict[str, Any]:
    """The answer to a request, [method, *arguments]: its value, or an error."""
    try:
        return {"value": _value(request[0], request[1:])}
    except (TokenizerError, UserError) as error:
        return {"error": [type(error).__name__, str(error)]}


def main() -> None:
    # Import what is imported on first use, since files cannot be opened later.
    with suppress(TokenizerError):
        LocalTokenizer.open('{"a": 1, "a": 2}')
    for source in ("{{ ['<a>'] | pprint | striptags | wordwrap(2) }}{{ strftime_now('%c') }}", "{{ a.b }}"):
        with suppress(UserError):
            chat_template.render(source, [])
    serve(answer)
