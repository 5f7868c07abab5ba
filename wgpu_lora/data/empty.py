"""Remove empty answers, which would train a model to answer nothing."""

from __future__ import annotations

from dataclasses import replace

from wgpu_lora.data.examples import Alpaca, Completion, Conversation, Example, Text


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
            rest = example.trained - empty
            return (replace(example, trained=rest), len(empty)) if rest and completion_only_loss else (None, 0)
        case _:
            return example, 0


def _answers(example: Conversation) -> set[int]:
    return {i for i, message in enumerate(example.messages) if message["role"] == "assistant"}


def _is_empty(message: dict[str, object]) -> bool:
    return not message.get("tool_calls") and not str(message["content"] or "").strip()
