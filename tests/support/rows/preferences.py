"""Rows of objectives that are not in the package: preferences, as TRL has them, and labelled answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from wgpu_lora.data.column_types import FLAG, NUMBER, TEXT_OR_MESSAGES, TOKENS
from wgpu_lora.data.example_formats import CHAT_COLUMNS, answer_to
from wgpu_lora.data.row_formats import Fields, RowFormat, RowFormats
from wgpu_lora.formats.tokenizer.examples import Sample, Tokens
from wgpu_lora.train.objectives.objective import Objective


def _pair(row: Fields) -> Sample:
    weight = row["weight"]
    pair = answer_to(row, "prompt", "chosen"), answer_to(row, "prompt", "rejected")
    return Sample(pair, 1.0 if weight is None else weight)


def _pair_of_tokens(row: Fields) -> Sample:
    prompt = row["prompt_ids"]
    answers = row["chosen_ids"], row["rejected_ids"]
    pair = tuple(Tokens(prompt + answer, [-100] * len(prompt) + answer) for answer in answers)
    return Sample(pair, row["weight"])


def _columns(kind: Any, *names: str) -> dict[str, Any]:
    return dict.fromkeys(names, kind)


@dataclass(frozen=True)
class Preferences(Objective):
    """Pairs of answers, as text, messages or tokens, and their weight."""

    formats: ClassVar = RowFormats(
        (
            RowFormat(
                {**_columns(TOKENS, "prompt_ids", "chosen_ids", "rejected_ids"), "weight": NUMBER}, _pair_of_tokens
            ),
            RowFormat(
                _columns(TEXT_OR_MESSAGES, "prompt", "chosen", "rejected"), _pair, {"weight": NUMBER, **CHAT_COLUMNS}
            ),
        )
    )
    rows_per_sample: ClassVar[int] = 2


@dataclass(frozen=True)
class Labelled(Objective):
    """Answers that are good or bad, as KTO reads them."""

    formats: ClassVar = RowFormats(
        (
            RowFormat(
                {**_columns(TEXT_OR_MESSAGES, "prompt", "completion"), "label": FLAG},
                lambda row: Sample((answer_to(row, "prompt", "completion"),), 1.0 if row["label"] else -1.0),
                CHAT_COLUMNS,
            ),
        )
    )
