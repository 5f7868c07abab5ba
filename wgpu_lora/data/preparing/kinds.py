"""Kinds of rows: examples for fine-tuning, pairs of answers, and labelled answers, told apart by their keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from wgpu_lora.data.columns import Fields, RowFormat, RowFormats
from wgpu_lora.data.examples import Sample
from wgpu_lora.data.formats import EXAMPLES
from wgpu_lora.data.preferences import LABELLED, PAIRS
from wgpu_lora.errors import UserError
from wgpu_lora.words import listed

EXAMPLE, PAIR, LABEL = "example", "pair", "labelled answer"
# Where rows of a kind are written; examples go into TRAIN and VALID.
TRAIN, VALID = "train.jsonl", "valid.jsonl"
FILES = {EXAMPLE: TRAIN, PAIR: "preferences.jsonl", LABEL: "labelled.jsonl"}


@dataclass(frozen=True)
class Read:
    """A row that was read. format: its required keys."""

    kind: str
    format: str
    sample: Sample


def _tagged(kind: str, formats: RowFormats[Sample]) -> tuple[RowFormat[Read], ...]:
    return tuple(_reading(kind, form) for form in formats.formats)


def _reading(kind: str, form: RowFormat[Sample]) -> RowFormat[Read]:
    name = ", ".join(form.required)
    return RowFormat(form.required, lambda row: Read(kind, name, form.read(row)), form.optional)


ROWS: RowFormats[Read] = RowFormats(
    (*_tagged(PAIR, PAIRS), *_tagged(LABEL, LABELLED), *_tagged(EXAMPLE, EXAMPLES)), every=True
)
# Columns that may hold messages, and those that may hold the text of an answer.
MESSAGE_COLUMNS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
ANSWER_COLUMNS = ("completion", "chosen", "rejected", "output", "text")
Row = dict[str, Any]


def examples_only(patterns: Sequence[str]) -> RowFormats[Read]:
    """The formats, for files that may not give pairs and labelled answers, since they do not match the patterns."""
    those = listed([repr(pattern) for pattern in patterns])

    def refusing(form: RowFormat[Read]) -> RowFormat[Read]:
        def read(row: Fields) -> Read:
            found = form.read(row)
            if found.kind != EXAMPLE:
                raise UserError(f"{found.kind}s are only taken from files that match {those}.")
            return found

        return replace(form, read=read)

    return replace(ROWS, formats=tuple(map(refusing, ROWS.formats)))
