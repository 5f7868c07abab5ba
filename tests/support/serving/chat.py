"""What the tests of chatting share: a model of words with a chat template, and two adapters of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import wgpu_lora
from support.models import words_and_adapters, words_model
from wgpu_lora.infer.chat import Chat
from wgpu_lora.infer.generation_options import GenerationOptions
from wgpu_lora.models.loaded_model import LoadedModel

# A word before every message, by role: the whole conversation is what it looks like.
TEMPLATE = (
    "{%- for m in messages -%}{%- if m.role == 'user' -%}w1 {% elif m.role == 'system' -%}w3 {% else -%}w2 {% endif -%}"
    "{{- m.content + ' ' -}}{%- endfor -%}{%- if add_generation_prompt -%}w2 {%- endif -%}"
)
TOKENS = 4


def make_models(directory: Path) -> Path:
    words_model(directory / "plain")
    return words_and_adapters(directory, TEMPLATE)


@contextmanager
def chats(model: LoadedModel, directory: Path) -> Iterator[Callable[..., Chat]]:
    """Begins chats with those of these names, and closes them."""
    opened: list[Chat] = []

    def start(*names: str, max_length: int | None = None, **settings: Any) -> Chat:
        adapters = {name: directory / name for name in names if name != "base"}
        options = GenerationOptions(**{"max_new_tokens": TOKENS, **settings})
        opened.append(Chat(model, adapters, names or ("base",), options, max_length))
        return opened[-1]

    yield start
    for chat in opened:
        chat.close()


def say(chat: Chat, text: str) -> dict[str, str]:
    reply = dict.fromkeys(chat.lanes, "")
    for name, piece in chat.ask(text):
        reply[name] += piece
    return reply


def at_once(model: LoadedModel, messages: list[dict[str, Any]], adapter: Path | None = None, **options: Any) -> str:
    return wgpu_lora.generate(model, messages, adapter=adapter, **{"max_new_tokens": TOKENS, **options})
