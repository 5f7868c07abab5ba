"""A chat with a loaded model: several turns, with one adapter or several side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wgpu_lora.data import Tokenizer, read_jsonl
from wgpu_lora.data.example_formats import parse_example
from wgpu_lora.errors import NoRoomError, UserError
from wgpu_lora.events import SILENT, Events
from wgpu_lora.formats.tokenizer.examples import CHAT, Conversation
from wgpu_lora.infer.answers import StreamedAnswer, notes_for, replies, tokenizer_of
from wgpu_lora.infer.generation_options import GenerationOptions
from wgpu_lora.infer.generator import Generator
from wgpu_lora.infer.named_adapters import BASE, adapters_on_device, slots_of
from wgpu_lora.infer.prompts import chat_prompt, check_text, trained_prompt_format
from wgpu_lora.models.adapter_modules import read_adapter_for
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.names.spelling import flag
from wgpu_lora.names.text import join_words

CAPACITY, LEAST = 4096, 512  # tokens of a conversation by default, and the minimum if memory is short


class Chat:
    """A chat, without its user interface.

    Args:
        adapters: PEFT adapter directories by name.
        names: adapters that answer, or "base". Each has its own conversation.
        max_length: tokens of a conversation including the answer; by default 4096, or fewer if the model or the
            device's memory limits them.

    Raises:
        UserError: the model has no tokenizer, an adapter cannot be read or does not fit, or max_length is invalid.
    """

    def __init__(
        self,
        model: LoadedModel,
        adapters: Mapping[str, Path],
        names: Sequence[str],
        settings: GenerationOptions,
        max_length: int | None = None,
        events: Events = SILENT,
    ):
        self.model, self.settings = model, settings
        self.adapters = dict(adapters)
        self.tokenizers = {name: tokenizer_of(model, adapters.get(name)) for name in (BASE, *adapters)}
        if self.adapters:
            slots_of(self.adapters, True)  # the base can be selected at any time
        self.lanes = {name: ChatHistory(name) for name in names}
        self.replies: dict[str, Any] = {}  # of the last turn
        self.left_out: dict[str, int] = {}  # turns that were left out of the prompt, by name
        self._stack = ExitStack()
        self._generator: Generator | None = None
        self._attempt = 0
        limit = model.config.max_position_embeddings
        self._explicit_length = max_length is not None
        if max_length is not None and not 2 <= max_length <= limit:
            raise UserError(
                f"{flag('max_length')} must be from 2 to {limit:,}, the limit of {model.name}, not {max_length:,}."
            )
        self.capacity = max_length or min(CAPACITY, limit)
        self.shrunk = False  # the length was reduced to fit memory, which the user has not been shown yet
        self._events = events

    @property
    def tokenizer(self) -> Tokenizer:
        """That of the first selected adapter."""
        return self.tokenizers[next(iter(self.lanes))]

    @property
    def templated(self) -> bool:
        """Whether messages go through a chat template; if not, every message is a prompt of its own."""
        return self.tokenizer.has_chat_template and self.prompt_format in (None, CHAT)

    @property
    def base(self) -> str:
        """The name of the model without an adapter."""
        return BASE

    @property
    def speakers(self) -> dict[str, str]:
        """Who can answer, by name, and what it is."""
        return {BASE: "the model without an adapter", **{name: str(path) for name, path in self.adapters.items()}}

    def introduction(self) -> list[str]:
        """Who answers, then notes for the user."""
        result = [f"{self.model.name}, answered by {join_words([*self.lanes])}."]
        if self.model.name == "demo" and BASE in self.lanes:
            result.append("[the demo's model writes small Python functions over lists of integers, and nothing else]")
        if not self.templated:
            why = "The adapter was trained so" if self.tokenizer.has_chat_template else "The model has no chat template"
            wording = "in Alpaca's wording" if self.prompt_format == "alpaca" else "as plain text"
            result.append(f"{why}: it gets every message {wording}, without the earlier ones.")
        return result + [f"[{note}]" for note in notes_for(self.model, self.adapters.values())]

    @property
    def prompt_format(self) -> str | None:
        """How messages are worded: as the settings say, or as the selected adapters were trained."""
        directories = [directory for name, directory in self.adapters.items() if name in self.lanes]
        return self.settings.prompt_format or trained_prompt_format(directories)

    # -- a turn ----------------------------------------------------------------------------------------------------

    def ask(self, text: str, should_stop: Callable[[], bool] = lambda: False) -> Iterator[tuple[str, str]]:
        """Send a message to all selected adapters, yielding (name, piece of an answer); then store the turn.

        Args:
            should_stop: called after every token; if true, the answer ends there.

        Raises:
            UserError: the message is too long, or the model cannot be used; the turn is then not stored.
        """
        self._attempt = 0
        yield from self._ask(text, should_stop)

    def retry(self, should_stop: Callable[[], bool] = lambda: False) -> Iterator[tuple[str, str]]:
        """Send the last message again, with other random draws."""
        before = {name: lane.copy_for(name) for name, lane in self.lanes.items()}
        text = self.undo()
        self._attempt += 1
        try:
            yield from self._ask(text, should_stop)
        except BaseException:
            self.lanes = before
            raise
        if not self.remembered:
            self.lanes = before

    def _ask(self, text: str, should_stop: Callable[[], bool]) -> Iterator[tuple[str, str]]:
        generator = self.open()
        names = list(self.lanes)
        worded = replace(self.settings, prompt_format=self.prompt_format)
        tokenizers = [self.tokenizers[name] for name in names]
        prompts = [
            lane.prompt(tokenizer, text, worded, self.capacity)
            for tokenizer, lane in zip(tokenizers, self.lanes.values(), strict=True)
        ]
        ids = [prompt for prompt, _ in prompts]
        result = [
            StreamedAnswer(tokenizer, len(prompt), tuple(self.settings.stop))
            for tokenizer, prompt in zip(tokenizers, ids, strict=True)
        ]
        order = list(self.adapters)
        slots = [None if name == BASE else order.index(name) for name in names]
        settings = replace(self.settings, seed=self.settings.seed + self._attempt)
        for number, piece in replies(generator, result, ids, slots, settings, should_stop=should_stop):
            if piece:
                yield names[number], piece
        self.replies = dict(zip(names, result, strict=True))
        self.left_out = {name: count for name, (_, count) in zip(names, prompts, strict=True) if count}
        if self.remembered:
            for name, reply in self.replies.items():
                self.lanes[name].add(text, reply.text)

    @property
    def remembered(self) -> bool:
        """Whether the last turn was stored; one that was stopped before its first token is not."""
        return any(r.text or r.generation.stop_reason != "interrupt" for r in self.replies.values())

    def undo(self) -> str:
        """Remove the last turn and return the user's message.

        Raises:
            UserError: there is no turn.
        """
        texts = [text for lane in self.lanes.values() if (text := lane.undo()) is not None]
        if not texts:
            raise UserError("No message has been sent yet: send one first.")
        return texts[0]

    def reset(self, messages: Sequence[Message] = ()) -> None:
        """Start a new conversation, or continue from these messages."""
        self.lanes = {name: ChatHistory(name, [{**message} for message in messages]) for name in self.lanes}

    # -- who answers -----------------------------------------------------------------------------------------------

    def select(self, names: Sequence[str]) -> None:
        """Select the adapters that answer. New ones continue from the first one's conversation.

        Raises:
            UserError: the device has no room for them; the selection is then unchanged.
        """
        before, first = self.lanes, next(iter(self.lanes.values()))
        self.lanes = {name: before.get(name) or first.copy_for(name) for name in names}
        try:
            self.open()
        except UserError:
            self.lanes = before
            raise

    def add(self, name: str, directory: Path) -> None:
        """Load another adapter.

        Raises:
            UserError: it cannot be read, does not fit the model or the device, or its name is taken.
        """
        slots_of({name: directory}, True)
        if name in self.adapters:
            raise UserError(f"An adapter '{name}' is already loaded ({self.adapters[name]}): name this one NAME=DIR.")
        read_adapter_for(self.model.config, directory)
        self.tokenizers[name] = tokenizer_of(self.model, directory)
        before = self.adapters
        self.adapters = {**before, name: directory}
        self.close()
        try:
            self.open()
        except UserError:
            self.adapters = before
            raise

    # -- the device ------------------------------------------------------------------------------------------------

    def open(self) -> Generator:
        """Load the model and the adapters that are not loaded yet.

        Raises:
            UserError: an adapter cannot be read, or the device has no room.
        """
        if self._generator and self._generator.batch == len(self.lanes):
            return self._generator
        self.close()
        while True:
            try:
                with ExitStack() as stack:
                    adapters = stack.enter_context(adapters_on_device(self.model, list(self.adapters.values())))
                    generator = Generator(self.model, adapters, self.capacity, len(self.lanes), events=self._events)
                    self._generator = stack.enter_context(generator)
                    self._stack = stack.pop_all()
                    return self._generator
            except NoRoomError:
                if self._explicit_length or self.capacity <= LEAST:
                    raise
            self.capacity, self.shrunk = max(LEAST, self.capacity // 2), True

    def close(self) -> None:
        """Free the adapters and the caches; the model stays loaded."""
        self._generator = None
        self._stack.close()

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


Message = dict[str, Any]
ROOM = 4  # 1/4 of the tokens is reserved for the answer, or max_new_tokens if that is less


@dataclass
class ChatHistory:
    """A conversation with one adapter, or with the base model.

    messages: of the user and the assistant, alternating, without a system message.
    first: index of the oldest message that is still in the prompt.
    """

    name: str
    messages: list[Message] = field(default_factory=list)
    first: int = 0

    def copy_for(self, name: str) -> ChatHistory:
        """A copy of the conversation for another adapter."""
        return ChatHistory(name, [*self.messages], self.first)

    def add(self, text: str, answer: str) -> None:
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def undo(self) -> str | None:
        """Remove the last turn and return the user's message; None if there is none."""
        turns = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not turns:
            return None
        text = self.messages[turns[-1]]["content"]
        del self.messages[turns[-1] :]
        self.first = 0
        return str(text)

    def prompt(
        self, tokenizer: Tokenizer, text: str, settings: GenerationOptions, capacity: int
    ) -> tuple[list[int], int]:
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
            conversation = [*self.messages[first:], {"role": "user", "content": text}]
            content: Any = conversation if templated else text
            ids = chat_prompt(tokenizer, content, settings.system, settings.prompt_format, **settings.template_kwargs)
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


def rows_of(lanes: Iterable[ChatHistory], system: str | None, templated: bool) -> list[dict[str, Any]]:
    """Rows to train on: a conversation per lane or, without a chat template, a prompt and completion per turn."""
    rows: list[dict[str, Any]] = []
    histories = [lane for lane in lanes if lane.messages]
    for lane in histories:
        adapter_field = {"adapter": lane.name} if len(histories) > 1 else {}
        if templated:
            before = [{"role": "system", "content": system}] if system is not None else []
            rows.append({"messages": [*before, *lane.messages], **adapter_field})
        else:
            pairs = zip(lane.messages[::2], lane.messages[1::2], strict=True)
            rows += [
                {"prompt": question["content"], "completion": text["content"], **adapter_field}
                for question, text in pairs
            ]
    return rows


def to_jsonl(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def read_conversations(path: Path) -> list[tuple[str | None, list[Message]]]:
    """(system message, other messages) of every row of a JSONL file.

    Raises:
        UserError: the file cannot be read, or a row is not a conversation.
    """
    result: list[tuple[str | None, list[Message]]] = []
    for number, row in read_jsonl(path):
        try:
            example = parse_example(row)
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
        if not isinstance(example, Conversation):
            raise UserError(f"{path}, line {number}: the row has no messages.")
        messages = [{**message} for message in example.messages]
        system = messages.pop(0)["content"] if messages[0]["role"] == "system" else None
        result.append((system, messages))
    return result
