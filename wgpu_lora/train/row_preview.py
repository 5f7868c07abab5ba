"""Rows as a model gets them, one by one: for people who check what is trained before they train."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from wgpu_lora.data import UNTRAINED, Row, Source, StreamDecoder, Tokenizer
from wgpu_lora.data.columns import RowFormats
from wgpu_lora.data.source import Place, Problem, Rows
from wgpu_lora.errors import UserError
from wgpu_lora.models.files import ModelFiles
from wgpu_lora.train.length import fit_length
from wgpu_lora.train.objectives import formats_of, objective_of
from wgpu_lora.train.options.arguments import TrainingArguments
from wgpu_lora.train.rows import prepared_for
from wgpu_lora.train.teacher import with_template_date


@dataclass(frozen=True)
class Token:
    """A token of a row. text: '' where it only begins or ends a character."""

    id: int
    text: str
    trained: bool


@dataclass(frozen=True)
class RowPreview:
    """What becomes of a row of the data.

    rows: tokens of each sequence that is trained on; a pair gives two, chosen and rejected. notes: what is left out of
    them or was changed. refusal: why nothing is trained on, or None.
    """

    place: Place
    rows: list[list[Token]]
    notes: list[str]
    refusal: str | None = None


def preview_rows(
    args: TrainingArguments, model: ModelFiles, source: Source, numbers: Collection[int] = (), most: int = 3
) -> Iterator[RowPreview]:
    """Yield rows of a source as training with these options would read them.

    Args:
        numbers: of the rows, from 1; by default the first `most`. Those that the source does not have are left out.

    Raises:
        UserError: the data cannot be read, or the chat template is unusable.
    """
    args, _ = fit_length(replace(args, skip_bad_rows=False), model.config.max_position_embeddings)
    args = with_template_date(args, model)
    last = max(numbers, default=most)
    for number, (place, row) in enumerate(source.rows(formats_of(objective_of(args))), 1):
        if number in numbers or not numbers:
            yield _preview(args, model, _OneRow(source, place, row))
        if number == last:
            return


def _preview(args: TrainingArguments, model: ModelFiles, one: _OneRow) -> RowPreview:
    if isinstance(one.row, Problem):
        return RowPreview(one.place, [], [], one.row.reason)
    try:
        prepared = prepared_for(args, model, one)
    except UserError as error:
        return RowPreview(one.place, [], [], str(error).removeprefix(f"{one.source.where(one.place)}: "))
    notes = [note.removesuffix(f" ({one.place})") for note in prepared.account.outcomes(args.length)]
    return RowPreview(one.place, [_tokens(row, model.tokenizer) for row in prepared.rows], notes)


def _tokens(row: Row, tokenizer: Tokenizer | None) -> list[Token]:
    ids = row.input_ids.tolist()
    texts = [""] * len(ids)
    if tokenizer is not None:
        decoder = StreamDecoder(tokenizer, skip_special_tokens=False)
        texts = [decoder.push(id) for id in ids]
        texts[-1] += decoder.flush()
    trained = row.labels != UNTRAINED
    trained[0] = False  # nothing predicts the first token
    return [Token(id, text, bool(on)) for id, text, on in zip(ids, texts, trained, strict=True)]


def segments(tokens: list[Token]) -> list[tuple[bool, list[Token]]]:
    """Runs of tokens that are trained on, or not."""
    return [(trained, list(run)) for trained, run in groupby(tokens, key=lambda token: token.trained)]


@dataclass(frozen=True)
class _OneRow:
    """A source of a single row of another one."""

    source: Source
    place: Place
    row: dict[str, Any] | Problem

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def rows(self, formats: RowFormats[Any]) -> Rows:
        return iter([(self.place, self.row)])

    def digest(self) -> str | None:
        return None
