"""What rows are converted to: examples, and samples of examples that belong together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
    def asked(self) -> list[dict[str, Any]]:
        """The messages before the output, for models with a chat template."""
        before = [{"role": "system", "content": self.system}] if self.system else []
        question = f"{self.instruction}\n\n{self.input}" if self.input else self.instruction
        return [*before, {"role": "user", "content": question}]


@dataclass(frozen=True)
class Text:
    text: str


Example = Tokens | Conversation | Completion | Alpaca | Text
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
        case Alpaca():
            return CHAT if templated else ALPACA
        case _:
            return None


@dataclass(frozen=True)
class Sample:
    """The unit that an objective trains on: examples that belong together, and a value whose meaning it defines."""

    examples: tuple[Example, ...]
    value: float = 1.0
