"""A chat with a server's models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.formats.tokenizer.examples import CHAT
from wgpu_lora.infer.chat import Chat, ChatHistory
from wgpu_lora.infer.generation_options import GenerationOptions
from wgpu_lora.infer.generator import Generation
from wgpu_lora.infer.serve.client import ServerClient, request_of
from wgpu_lora.names.text import join_words


class ServedChat(Chat):
    """A chat with the models of a server. max_tokens: see `request_of`, until the setting is changed."""

    def __init__(self, client: ServerClient, settings: GenerationOptions, max_tokens: int | None) -> None:
        self.client, self.settings = client, settings
        self.adapters, self.lanes = {}, {client.model: ChatHistory(client.model)}
        self.replies, self.left_out, self.shrunk, self._attempt = {}, {}, False, 0
        self._limit = settings.max_new_tokens, max_tokens

    @property
    def speakers(self) -> dict[str, str]:
        return dict.fromkeys([self.client.model, *self.client.models()], self.client.url)

    @property
    def base(self) -> str:
        return self.client.models()[0]

    @property
    def templated(self) -> bool:
        return self.settings.prompt_format in (None, CHAT)

    def introduction(self) -> list[str]:
        return [f"{self.client.url}, answered by {join_words([*self.lanes])}."]

    def _ask(self, text: str, should_stop: Callable[[], bool]) -> Iterator[tuple[str, str]]:
        settings = replace(self.settings, seed=self.settings.seed + self._attempt)
        before, limit = self._limit
        if settings.max_new_tokens != before:
            limit = settings.max_new_tokens
        answers = {name: ServedReply() for name in self.lanes}
        for name, lane in self.lanes.items():
            prompt: Any = [*lane.messages, {"role": "user", "content": text}] if self.templated else text
            path, body = request_of(prompt, settings, limit)
            answer = answers[name]
            with self.client.understood(), self.client.events(path, {**body, "model": name}) as chunks:
                for choice in (choice for chunk in chunks for choice in chunk["choices"]):
                    piece = (choice["text"] if "text" in choice else choice["delta"].get("content")) or ""
                    answer.text += piece
                    answer.generation.stop_reason = choice.get("finish_reason") or answer.generation.stop_reason
                    if should_stop():
                        answer.generation.stop_reason = "interrupt"
                        break
                    yield name, piece
            if not answer.generation.stop_reason:
                raise UserError(f"The server {self.client.url} ended before its answer did: ask again once it runs.")
        self.replies = answers
        if self.remembered:
            for name, answer in answers.items():
                self.lanes[name].add(text, answer.text)

    def open(self) -> Any:
        """The server has its models open already; raises UserError if it lacks one that answers."""
        known = self.speakers
        for name in self.lanes:
            if name not in known:
                raise UserError(f"The server {self.client.url} has no model '{name}': it has {join_words([*known])}.")

    def add(self, name: str, directory: Path) -> None:
        raise UserError(f"A server loads its adapters itself: name one of {join_words([*self.speakers])}.")


@dataclass
class ServedReply:
    """A server's answer, as `StreamedAnswer` has one."""

    text: str = ""
    generation: Generation = field(default_factory=lambda: Generation(0))
