"""The formats of preference rows: pairs of answers to one prompt, and single answers with a label, as in TRL.

Pairs (`PAIRS`), a sample of two examples, chosen and rejected, which begin with the same prompt and train on the rest:

    prompt_ids, chosen_ids, rejected_ids    tokens, as TRL's trainers store them
    prompt, chosen, rejected [tools]        three texts, or three lists of messages
    chosen, rejected [tools]                two texts or conversations, which begin with the prompt

Answers with a label (`LABELLED`), a sample of one example with the value 1 (desirable) or -1 (undesirable):

    prompt_ids, completion_ids, label       tokens
    prompt, completion, label [tools]       two texts, or two lists of messages

Other columns are not read.
"""

from __future__ import annotations

from typing import Any

from wgpu_lora.data.column_types import FLAG, TEXT_OR_MESSAGES, TOKENS
from wgpu_lora.data.example_formats import CHAT_COLUMNS, answer_to, conversation
from wgpu_lora.data.json_values import kind_of
from wgpu_lora.data.row_formats import Fields, RowFormat, RowFormats, renaming
from wgpu_lora.errors import UserError
from wgpu_lora.tokenizer.examples import Completion, Conversation, Sample, Tokens, without_empty_answers

DESIRABLE, UNDESIRABLE = 1.0, -1.0
_UNTRAINED = -100


def _pair(row: Fields) -> Sample:
    """The sample of a row with a prompt."""
    prompt, chosen, rejected = (row.columns.get(name) for name in ("prompt", "chosen", "rejected"))
    if isinstance(prompt, str) and isinstance(chosen, list) and isinstance(rejected, list):
        raise UserError(
            "'prompt' is a string, but 'chosen' and 'rejected' are lists of messages; give it as a list of messages, "
            "too, or remove it if they begin with it."
        )
    _refuse_equal(row["chosen"], row["rejected"])
    return Sample((_answered(row, "chosen"), _answered(row, "rejected")))


def _answered(row: Fields, name: str) -> Completion | Conversation:
    example = answer_to(row, "prompt", name)
    _refuse_unanswered(example, name)
    return example


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
        if advice := renaming([*row.columns], [["prompt", "chosen", "rejected"]]):
            raise UserError(f"the row has no 'prompt'; {advice}.")
        pair: tuple[Completion | Conversation, ...] = tuple(
            Completion(text[:shared], text[shared:]) for text in (chosen, rejected)
        )
    else:
        pair = conversation(row, chosen, shared), conversation(row, rejected, shared)
    for name, example in zip(("chosen", "rejected"), pair, strict=True):
        _refuse_unanswered(example, name)
    return Sample(pair)


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


def _labelled(row: Fields) -> Sample:
    return Sample((_answered(row, "completion"),), _value(row))


def _value(row: Fields) -> float:
    return DESIRABLE if row["label"] else UNDESIRABLE


def _refuse_equal(chosen: Any, rejected: Any, suffix: str = "") -> None:
    if chosen == rejected:
        raise UserError(f"'chosen{suffix}' and 'rejected{suffix}' are equal, so there is nothing to prefer.")


def _refuse_unanswered(example: Completion | Conversation, name: str) -> None:
    if isinstance(example, Conversation) and not example.trained:
        raise UserError(f"'{name}' has no message of the assistant to train on.")
    if without_empty_answers(example, True)[0] is None:
        raise UserError(f"'{name}' is empty, so there is nothing to train on; give an answer or remove the row.")


def _columns(kind: Any, *names: str) -> dict[str, Any]:
    return dict.fromkeys(names, kind)


PAIRS = RowFormats(
    (
        RowFormat(_columns(TOKENS, "prompt_ids", "chosen_ids", "rejected_ids"), _pair_of_tokens),
        RowFormat(_columns(TEXT_OR_MESSAGES, "prompt", "chosen", "rejected"), _pair, CHAT_COLUMNS),
        RowFormat(_columns(TEXT_OR_MESSAGES, "chosen", "rejected"), _implicit, CHAT_COLUMNS),
    )
)
LABELLED = RowFormats(
    (
        RowFormat(
            {**_columns(TOKENS, "prompt_ids", "completion_ids"), "label": FLAG},
            lambda row: Sample((_tokens(row, "completion_ids"),), _value(row)),
        ),
        RowFormat({**_columns(TEXT_OR_MESSAGES, "prompt", "completion"), "label": FLAG}, _labelled, CHAT_COLUMNS),
    )
)
