"""Examples, which rows are converted to, and samples of examples that belong together."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from wgpu_lora.errors import UserError

TOO_DEEP = "the row is nested too deeply; simplify it."


@dataclass(frozen=True)
class Tokens:
    """A tokenised row. `labels` are unshifted, with -100 for tokens that are not trained on."""

    input_ids: list[int]
    labels: list[int]


@dataclass(frozen=True)
class Conversation:
    """Messages for the chat template; `trained` are the positions of the turns to train on."""

    messages: list[dict[str, Any]]
    trained: frozenset[int]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    prompt: str
    completion: str


@dataclass(frozen=True)
class Alpaca:
    instruction: str
    input: str
    output: str
    system: str

    @property
    def prompt_messages(self) -> list[dict[str, Any]]:
        """The messages before the output, for models with a chat template."""
        before = [{"role": "system", "content": self.system}] if self.system else []
        question = f"{self.instruction}\n\n{self.input}" if self.input else self.instruction
        return [*before, {"role": "user", "content": question}]


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Prompt:
    """What a model is asked, without an answer: a text that it continues, or messages for the chat template."""

    prompt: str | list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)


Example = Tokens | Conversation | Completion | Alpaca | Text | Prompt


def texts_of(example: Example) -> list[str]:
    """The texts of an example that the row has, without those of tools."""
    match example:
        case Conversation():
            return [text for message in example.messages for text in message.values() if isinstance(text, str)]
        case Prompt():
            messages = [{"content": example.prompt}] if isinstance(example.prompt, str) else example.prompt
            return [text for message in messages for text in message.values() if isinstance(text, str)]
        case Alpaca():
            return [example.system, example.instruction, example.input, example.output]
        case Completion():
            return [example.prompt, example.completion]
        case Text():
            return [example.text]
        case _:
            return []


def example_json(example: Example) -> str:
    """An example as JSON, for `example_of`; empty if it is nested too deeply."""
    fields = vars(example) | ({"trained": sorted(example.trained)} if isinstance(example, Conversation) else {})
    try:
        return json.dumps([type(example).__name__, fields], default=str)
    except (RecursionError, TypeError, ValueError):
        return ""


def example_of(text: str) -> Example:
    """The example of `example_json`. Raises UserError."""
    try:
        kind, fields = json.loads(text)
    except (RecursionError, ValueError):
        raise UserError(TOO_DEEP) from None
    return {cls.__name__: cls for cls in (Conversation, Completion, Alpaca, Text, Prompt)}[kind](**fields)


PROMPT_FORMATS = CHAT, ALPACA, TEXT = "chat", "alpaca", "text"  # how a model is asked in training


def prompt_format(example: Example, templated: bool) -> str | None:
    """How the prompt of an example is worded in training, which a model without a chat template is not `templated` for.

    None for examples without a prompt of their own.
    """
    match example:
        case Conversation():
            return CHAT
        case Completion():
            return TEXT
        case Prompt():
            return TEXT if isinstance(example.prompt, str) else CHAT
        case Alpaca():
            return CHAT if templated else ALPACA
        case _:
            return None


@dataclass(frozen=True)
class Sample:
    """The unit that an objective trains on: examples that belong together, and a value whose meaning it defines.

    columns: of the row, for objectives whose rewards read them.
    """

    examples: tuple[Example, ...]
    value: float = 1.0
    columns: dict[str, Any] | None = None


def without_empty_answers(example: Example, completion_only_loss: bool) -> tuple[Example | None, int]:
    """Returns (example, or None if it has nothing to train on; number of its empty turns that are not trained on).

    An answer is empty if it is only white space and calls no tool. In a conversation, empty answers are kept as context
    but not trained on. If all text is trained on, a single empty answer removes the conversation.
    """
    match example:
        case Completion():
            return (example if example.completion.strip() else None), 0
        case Alpaca():
            return (example if example.output.strip() else None), 0
        case Text():
            return (example if example.text.strip() else None), 0
        case Conversation():
            turns = example.trained if completion_only_loss else _answers(example)
            empty = {i for i in turns if _is_empty(example.messages[i])}
            if not empty:
                return example, 0
            remaining = example.trained - empty
            return (
                (replace(example, trained=remaining), len(empty)) if remaining and completion_only_loss else (None, 0)
            )
        case _:
            return example, 0


def _answers(example: Conversation) -> set[int]:
    return {i for i, message in enumerate(example.messages) if message["role"] == "assistant"}


def _is_empty(message: dict[str, object]) -> bool:
    return not message.get("tool_calls") and not str(message["content"] or "").strip()
