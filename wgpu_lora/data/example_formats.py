"""The formats of rows that are one example each, or a prompt, and their conversion.

The keys of a row determine its format. If a row has the keys of several formats (Alpaca's file also has "text"), the
first in this order whose keys are not null is used:

    input_ids [labels, attention_mask]      tokens, and labels with -100 for tokens that are not trained on
    messages [system, tools]                a conversation in the format of OpenAI and TRL (data/messages.py)
    conversations [system, tools]           a conversation in the format of ShareGPT
    prompt, completion [tools]              two texts, or two lists of messages
    instruction, output [input, system]     Alpaca, with earlier turns in `history`
    text                                    plain text

Masks of tokens (`loss_mask`, `completion_mask`, `assistant_masks`) and `prompt_length` also say which tokens of
`input_ids` are trained on. A column that is not read ends the run if it would change what is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from wgpu_lora.data.column_types import (
    COUNT,
    FUNCTIONS,
    LABELS,
    MASK,
    MESSAGES,
    OBJECT,
    TEXT,
    TEXT_OR_MESSAGES,
    TOKENS,
    TOOLS,
    TURNS,
)
from wgpu_lora.data.json_values import kind_of
from wgpu_lora.data.row_formats import Fields, Row, RowFormat, RowFormats
from wgpu_lora.data.source import RowPosition, Source, strict_rows
from wgpu_lora.data.unread_columns import is_input
from wgpu_lora.errors import UserError
from wgpu_lora.formats.tokenizer.chat_template import check_variables
from wgpu_lora.formats.tokenizer.examples import Alpaca, Completion, Conversation, Example, Prompt, Sample, Text, Tokens

# Optional columns of conversations: what `answer_to` and `conversation` read besides the messages.
CHAT_COLUMNS = {"tools": TOOLS, "functions": FUNCTIONS, "chat_template_kwargs": OBJECT}
TOKEN_MASKS = ("loss_mask", "completion_mask", "assistant_masks")  # of verl and slime, TRL, transformers
QUESTION = {
    "context": "'context' is not read, so the question would be trained on without it; write it into the question, or "
    "rename it to 'input' beside 'instruction' and 'output'"
}
_UNLABELLED = QUESTION | {
    name: f"'{name}' may say whether the answer is desirable; use the objective kto for such rows, or remove it"
    for name in ("label", "kto_tag")
}


def answer_to(row: Fields, prompt: str, answer: str) -> Completion | Conversation:
    """The example whose column `answer` continues its column `prompt`; only the answer is trained on.

    Both columns are TEXT_OR_MESSAGES; the format has CHAT_COLUMNS, too.

    Raises:
        UserError: one is text and the other messages, or a field is wrong.
    """
    before, after = row[prompt], row[answer]
    if isinstance(before, str) and isinstance(after, str):
        return Completion(before, after)
    if isinstance(before, str) and after[0]["role"] == "assistant":
        before = [{"role": "user", "content": before}]
    if isinstance(before, str) or isinstance(after, str):
        raise UserError(
            f"'{prompt}' is {kind_of(row.columns[prompt])} and '{answer}' {kind_of(row.columns[answer])}, "
            "but both must be strings or both lists of messages."
        )
    return conversation(row, before + after, len(before))


def conversation(row: Fields, messages: list[dict[str, Any]], first_trained: int = 0) -> Conversation:
    """The example that trains on the assistant's messages from `first_trained` on, except those of weight 0."""
    trained = frozenset(
        i for i, message in enumerate(messages)
        if i >= first_trained and message["role"] == "assistant" and message.get("weight", 1)
    )  # fmt: skip
    tools, functions = row["tools"], row["functions"]
    if tools and functions and tools != functions:
        raise UserError("the row has both 'tools' and 'functions'; keep 'tools'.")
    kwargs = row["chat_template_kwargs"] or {}
    check_variables(kwargs)
    plain_messages = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
    return Conversation(plain_messages, trained, tools or functions, kwargs)


def with_system(row: Fields, column: str) -> list[dict[str, Any]]:
    """The messages of a column, behind the one of the column `system` unless they begin with their own."""
    messages: list[dict[str, Any]] = row[column]
    system = row["system"]
    return (
        [{"role": "system", "content": system}, *messages] if system and messages[0]["role"] != "system" else messages
    )


def alpaca(row: Fields, answer: str = "output") -> Alpaca:
    """An Alpaca row, whose answer is in the column `answer`."""
    return Alpaca(row["instruction"], row["input"] or "", row[answer] or "", row["system"] or "")


def _alpaca_with_history(row: Fields) -> Alpaca | Conversation:
    """An Alpaca row; with earlier turns, a conversation whose answers are all trained on, as in LLaMA-Factory."""
    example, turns = alpaca(row), row["history"]
    if not turns:
        return example
    [*system, question] = example.prompt_messages
    texts = [*(text for turn in turns for text in turn), question["content"], example.output]
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return conversation(row, [*system, *messages])


def _tokens(row: Fields) -> Tokens:
    ids, labels, mask, start = row["input_ids"], row["labels"], row["attention_mask"], row["prompt_length"] or 0
    labels = ids if labels is None else labels
    masks = {name: values for name in TOKEN_MASKS if (values := row[name]) is not None}
    for name, values in {"labels": labels, **masks}.items():
        if len(values) != len(ids):
            raise UserError(f"'{name}' has {len(values)} entries, but 'input_ids' has {len(ids)}; give one per token.")
    if any(-100 < label < 0 for label in labels):
        raise UserError("'labels' has a negative entry other than -100, which marks tokens that are not trained on.")
    if mask is not None and mask != [1] * len(ids):
        raise UserError("'attention_mask' must be 1 for every token; remove the padding, rows are packed later.")
    trained = [all(entries) for entries in zip(*masks.values(), strict=True)] if masks else [True] * len(ids)
    trained = [use and i >= start for i, use in enumerate(trained)]
    return Tokens(ids, [label if use else -100 for label, use in zip(labels, trained, strict=True)])


def _single(read: Callable[[Fields], Example]) -> Callable[[Fields], Sample]:
    return lambda row: Sample((read(row),))


EXAMPLES = RowFormats(
    (
        RowFormat(
            {"input_ids": TOKENS},
            _single(_tokens),
            {"labels": LABELS, "attention_mask": TOKENS, "prompt_length": COUNT, **dict.fromkeys(TOKEN_MASKS, MASK)},
        ),
        *(
            RowFormat(
                {name: MESSAGES},
                _single(partial(lambda name, row: conversation(row, with_system(row, name)), name)),
                {"system": TEXT, **CHAT_COLUMNS},
                _UNLABELLED,
            )
            for name in ("messages", "conversations")
        ),
        RowFormat(
            {"prompt": TEXT_OR_MESSAGES, "completion": TEXT_OR_MESSAGES},
            _single(lambda row: answer_to(row, "prompt", "completion")),
            CHAT_COLUMNS,
            _UNLABELLED,
        ),
        RowFormat(
            {"instruction": TEXT, "output": TEXT},
            _single(_alpaca_with_history),
            {"input": TEXT, "system": TEXT, "history": TURNS, **CHAT_COLUMNS},
            _UNLABELLED,
        ),
        RowFormat({"text": TEXT}, _single(lambda row: Text(row["text"]))),
    )
)


def parse_example(row: Row) -> Example:
    """Determine the format of a row by its keys, and validate its fields.

    Raises:
        UserError: the row fits no format or a field has the wrong type. The message names the field, not the position.
    """
    [example] = EXAMPLES.read(row).examples
    return example


def read_examples(source: Source) -> Iterator[tuple[RowPosition, Example]]:
    """Yield (position, example) for every row of a source.

    Raises:
        UserError: a row cannot be read or fits no format; names its position.
    """
    for position, row in strict_rows(source, EXAMPLES):
        try:
            example = parse_example(row)
        except UserError as error:
            raise UserError(f"{source.locate(position)}: {error}") from error
        yield position, example


# -- rows that are prompts, of which the model samples completions itself, as in TRL -----------------------------------
#
#    prompt_ids                  tokens
#    prompt [tools]              a text, or a list of messages
#    messages [tools]            a conversation, without what the assistant says at its end
#
# All columns are kept for reward functions (`Sample.columns`).

_OF_PROMPT = ("system", "tools", "functions", "chat_template_kwargs")  # columns that only a prompt can use


def before_answer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation without what the assistant says at its end."""
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    return messages


def _sample(row: Fields, prompt: Prompt | Tokens) -> Sample:
    return Sample((prompt,), columns=row.keep(but=lambda name: name in _OF_PROMPT or is_input(name)))


def _prompt_ids(row: Fields) -> Sample:
    ids = row["prompt_ids"]
    return _sample(row, Tokens(ids, ids))


def _text_or_messages(row: Fields) -> Sample:
    text = row["prompt"]
    return _sample(row, Prompt(text)) if isinstance(text, str) else _messages(row, text)


def _messages(row: Fields, messages: list[dict[str, Any]]) -> Sample:
    messages = before_answer(messages)
    if not messages:
        raise UserError("the conversation has no message before the assistant's, so there is no prompt.")
    chat = conversation(row, messages)
    return _sample(row, Prompt(chat.messages, chat.tools, chat.template_kwargs))


PROMPTS = RowFormats(
    (
        RowFormat({"prompt_ids": TOKENS}, _prompt_ids),
        RowFormat({"prompt": TEXT_OR_MESSAGES}, _text_or_messages, CHAT_COLUMNS),
        RowFormat(
            {"messages": MESSAGES},
            lambda row: _messages(row, with_system(row, "messages")),
            {"system": TEXT, **CHAT_COLUMNS},
        ),
    )
)
