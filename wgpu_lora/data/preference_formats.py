"""The formats of preference rows: pairs of answers to one prompt, and single answers with a label, as in TRL.

Pairs (`PAIRS`), a sample of two examples, chosen and rejected, which begin with the same prompt and train on the rest:

    prompt_ids, chosen_ids, rejected_ids    tokens, as TRL's trainers store them
    prompt, chosen, rejected [tools]        three texts, or three lists of messages; the prompt may be a text that the
                                            conversations `chosen` and `rejected` begin with (UltraFeedback)
    conversations, chosen, rejected         a conversation, also as `messages`, and an answer each (LLaMA-Factory)
    instruction, chosen, rejected [input, system]     the same of Alpaca rows
    input, preferred_output, non_preferred_output     OpenAI's
    chosen, rejected [tools]                two texts or conversations, which begin with the prompt

Answers with a label (`LABELLED`), a sample of one example with the value 1 (desirable) or -1 (undesirable):

    prompt_ids, completion_ids, label       tokens
    prompt, completion, label [tools]       two texts, or two lists of messages
    messages, label [system, tools]         a conversation, whose last answer the label is about; also `conversations`
    instruction, output, label [input, system]

The label may be called `kto_tag`, as in LLaMA-Factory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from wgpu_lora.data.column_types import ANSWER, FLAG, MESSAGES, OBJECT, TEXT, TEXT_OR_MESSAGES, TOKENS
from wgpu_lora.data.example_formats import CHAT_COLUMNS, QUESTION, alpaca, answer_to, conversation, with_system
from wgpu_lora.data.json_values import kind_of
from wgpu_lora.data.row_formats import Fields, RowFormat, RowFormats
from wgpu_lora.data.unread_columns import is_harmless
from wgpu_lora.errors import UserError
from wgpu_lora.formats.tokenizer.examples import (
    Completion,
    Conversation,
    Example,
    Sample,
    Tokens,
    without_empty_answers,
)
from wgpu_lora.names.text import join_words

DESIRABLE, UNDESIRABLE = 1.0, -1.0
_UNTRAINED = -100
Message = dict[str, Any]


def _pair(row: Fields) -> Sample:
    """The sample of a row with a prompt."""
    prompt, chosen, rejected = (row.columns.get(name) for name in ("prompt", "chosen", "rejected"))
    if isinstance(prompt, str) and isinstance(chosen, list) and isinstance(rejected, list):
        answers = row["chosen"], row["rejected"]
        if any(answer[0]["role"] != "assistant" for answer in answers):
            if _implicit_prompt(*answers).strip() != row["prompt"].strip():
                raise UserError(
                    "'prompt' is a text, but the conversations 'chosen' and 'rejected' do not begin with it; give it "
                    "as a list of messages, or remove it if they begin with the whole prompt."
                )
            return _implicit(row)
    _refuse_equal(row["chosen"], row["rejected"])
    return Sample((_answered(row, "chosen"), _answered(row, "rejected")))


def _answered(row: Fields, name: str) -> Completion | Conversation:
    example = answer_to(row, "prompt", name)
    _refuse_unanswered(example, name)
    return example


def _implicit_prompt(chosen: list[dict[str, Any]], rejected: list[dict[str, Any]]) -> str:
    """The text of the last message that two conversations have in common."""
    count = shared_prompt(chosen, rejected)
    return (chosen[count - 1]["content"] or "") if count else ""


def _implicit(row: Fields) -> Sample:
    """The sample of a row whose prompt is what both answers begin with."""
    chosen, rejected = row["chosen"], row["rejected"]
    if type(chosen) is not type(rejected):
        raise UserError(
            f"'chosen' is {kind_of(chosen)} and 'rejected' {kind_of(rejected)}, "
            "but both must be strings or both lists of messages."
        )
    _refuse_equal(chosen, rejected)
    shared = shared_prompt(chosen, rejected)
    if not shared:
        raise UserError("'chosen' and 'rejected' do not begin alike, so there is no prompt; give it as 'prompt'.")
    if isinstance(chosen, str):
        if advice := row.advice():
            raise UserError(f"the row has no 'prompt'; {advice}.")
        pair: tuple[Example, ...] = tuple(Completion(text[:shared], text[shared:]) for text in (chosen, rejected))
    else:
        pair = conversation(row, chosen, shared), conversation(row, rejected, shared)
    return _checked_pair(pair, ("chosen", "rejected"))


def _behind(column: str, row: Fields) -> Sample:
    """The sample of a row with a conversation in `column` and two answers (LLaMA-Factory's ranking rows)."""
    before, chosen, rejected = with_system(row, column), row["chosen"], row["rejected"]
    if any(answer[0]["role"] != "assistant" for answer in (chosen, rejected)):
        return _implicit(row)
    return _pair_behind(row, before, chosen, rejected)


def _pair_behind(row: Fields, before: list[Message], chosen: list[Message], rejected: list[Message]) -> Sample:
    _refuse_equal(chosen, rejected)
    pair = tuple(conversation(row, [*before, *answer], len(before)) for answer in (chosen, rejected))
    return _checked_pair(pair, ("chosen", "rejected"))


def _alpaca_pair(row: Fields) -> Sample:
    _refuse_equal(row["chosen"], row["rejected"])
    return _checked_pair(tuple(alpaca(row, name) for name in ("chosen", "rejected")), ("chosen", "rejected"))


def _openai(row: Fields) -> Sample:
    """A row of OpenAI's preference fine-tuning, whose column `input` has the fields of a conversation."""
    fields = Fields(row["input"], _OPENAI_INPUT)
    sample = _pair_behind(fields, fields["messages"], row["preferred_output"], row["non_preferred_output"])
    if unread := [name for name in fields.unread if not is_harmless(name)]:
        raise UserError(
            f"'input' has {join_words([repr(name[:80]) for name in unread])}, which is not read; remove it."
        )
    return sample


def _checked_pair(pair: Sequence[Example], names: Sequence[str]) -> Sample:
    for name, example in zip(names, pair, strict=True):
        _refuse_unanswered(example, name)
    return Sample(tuple(pair))


def shared_prompt(chosen: Any, rejected: Any) -> int:
    """The length of the prompt with which two different texts (in characters) or lists of messages begin.

    It is the longest common prefix, as in TRL's `extract_prompt`: without the last element if one continues the other,
    and without a space at its end.
    """
    shortest = min(len(chosen), len(rejected))
    differing = next((i for i in range(shortest) if chosen[i] != rejected[i]), None)
    if differing is None:
        return max(0, shortest - 1)
    return differing - 1 if differing and chosen[differing - 1] == " " else differing


def _pair_of_tokens(row: Fields) -> Sample:
    chosen, rejected = row["chosen_ids"], row["rejected_ids"]
    _refuse_equal(chosen, rejected, "_ids")
    return Sample((_tokens(row, "chosen_ids"), _tokens(row, "rejected_ids")))


def _tokens(row: Fields, name: str) -> Tokens:
    prompt, answer = row["prompt_ids"], row[name]
    if not answer:
        raise UserError(f"'{name}' is an empty list; give at least one token.")
    return Tokens(prompt + answer, [_UNTRAINED] * len(prompt) + answer)


def _labelled_tokens(label: str, row: Fields) -> Sample:
    return Sample((_tokens(row, "completion_ids"),), _value(row, label))


def _labelled_alpaca(label: str, row: Fields) -> Sample:
    return _checked_answer(alpaca(row), "output", row, label)


def _labelled(label: str, row: Fields) -> Sample:
    return Sample((_answered(row, "completion"),), _value(row, label))


def _labelled_conversation(column: str, label: str, row: Fields) -> Sample:
    """The last answer of a conversation, with a label."""
    messages = with_system(row, column)
    if messages[-1]["role"] != "assistant" or len(messages) < 2:
        raise UserError(f"'{column}' does not end with an answer of the assistant, which '{label}' is about; add it.")
    return _checked_answer(conversation(row, messages, len(messages) - 1), column, row, label)


def _checked_answer(example: Example, name: str, row: Fields, label: str) -> Sample:
    _refuse_unanswered(example, name)
    return Sample((example,), _value(row, label))


def _value(row: Fields, label: str) -> float:
    return DESIRABLE if row[label] else UNDESIRABLE


def _refuse_equal(chosen: Any, rejected: Any, suffix: str = "") -> None:
    if chosen == rejected:
        raise UserError(f"'chosen{suffix}' and 'rejected{suffix}' are equal, so there is nothing to prefer.")


def _refuse_unanswered(example: Example, name: str) -> None:
    if isinstance(example, Conversation) and not example.trained:
        raise UserError(f"'{name}' has no message of the assistant to train on.")
    if without_empty_answers(example, True)[0] is None:
        raise UserError(f"'{name}' is empty, so there is nothing to train on; give an answer or remove the row.")


def _columns(kind: Any, *names: str) -> dict[str, Any]:
    return dict.fromkeys(names, kind)


_ALPACA = {"input": TEXT, "system": TEXT}
_OPENAI_INPUT: RowFormat[Any] = RowFormat({"messages": MESSAGES}, lambda row: row, CHAT_COLUMNS)
PAIRS = RowFormats(
    (
        RowFormat(_columns(TOKENS, "prompt_ids", "chosen_ids", "rejected_ids"), _pair_of_tokens),
        RowFormat(_columns(TEXT_OR_MESSAGES, "prompt", "chosen", "rejected"), _pair, CHAT_COLUMNS, QUESTION),
        *(
            RowFormat(
                {name: MESSAGES, "chosen": ANSWER, "rejected": ANSWER},
                partial(_behind, name),
                {"system": TEXT, **CHAT_COLUMNS},
                QUESTION,
            )
            for name in ("conversations", "messages")
        ),
        RowFormat(_columns(TEXT, "instruction", "chosen", "rejected"), _alpaca_pair, _ALPACA, QUESTION),
        RowFormat({"input": OBJECT, **_columns(ANSWER, "preferred_output", "non_preferred_output")}, _openai),
        RowFormat(_columns(TEXT_OR_MESSAGES, "chosen", "rejected"), _implicit, CHAT_COLUMNS, QUESTION),
    )
)
LABELLED = RowFormats(
    tuple(
        form
        for label in ("label", "kto_tag")
        for form in (
            RowFormat(
                {**_columns(TOKENS, "prompt_ids", "completion_ids"), label: FLAG},
                partial(_labelled_tokens, label),
            ),
            RowFormat(
                {**_columns(TEXT_OR_MESSAGES, "prompt", "completion"), label: FLAG},
                partial(_labelled, label),
                CHAT_COLUMNS,
                QUESTION,
            ),
            *(
                RowFormat(
                    {name: MESSAGES, label: FLAG},
                    partial(_labelled_conversation, name, label),
                    {"system": TEXT, **CHAT_COLUMNS},
                    QUESTION,
                )
                for name in ("messages", "conversations")
            ),
            RowFormat(
                {**_columns(TEXT, "instruction", "output"), label: FLAG},
                partial(_labelled_alpaca, label),
                _ALPACA,
                QUESTION,
            ),
        )
    )
)
