"""Statistics of the rows of a run: lengths, formats, trained tokens, and what options make of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from wgpu_lora.data import UNTRAINED, Row, Sample, Source, StreamDecoder, TokenizedData, Tokenizer
from wgpu_lora.data.row_formats import Fields, RowFormat, RowFormats
from wgpu_lora.data.source import BadRow, RowPosition, Rows
from wgpu_lora.errors import UserError
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.models.model_files import ModelFiles
from wgpu_lora.train.objectives import formats_of, objective_of
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.rewards.function_process import Tools
from wgpu_lora.train.run.teacher_setup import with_template_date
from wgpu_lora.train.run.trained_options import fit_length, shortened
from wgpu_lora.train.session.data_stream import DataStream, group_lengths
from wgpu_lora.train.training_data import default_batches, prepared_for, read_rows, sources_of, tools_of

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
SHORTEST, LENGTHS = 64, 8  # tokens of the smallest --max-length that is tried, and how many are
_WHOLE = 2**31 - 1  # a --max-length that cuts nothing


@dataclass(frozen=True)
class Choice:
    """The batches that a --max-length makes of the rows, with or without packing.

    cut: rows that are truncated. lost: rows that lose all of their trained tokens. trained: share of the trained tokens
    that is kept. steps: optimizer steps of an epoch. tokens: of an epoch. positions: rows of its batches, which hold
    tokens or padding.
    """

    max_length: int
    packing: bool
    cut: int
    lost: int
    trained: float
    steps: int
    tokens: int
    positions: int

    @property
    def padding(self) -> float:
        """Share of the positions that hold no token."""
        return 1 - self.tokens / self.positions


@dataclass(frozen=True)
class RowStatistics:
    """lengths: tokens of each row after the chat template, before it is cut. formats: rows by the required keys of
    their format. own: as the options say; others: other lengths, with and without packing."""

    name: str
    summary: str
    formats: dict[str, int]
    lengths: np.ndarray
    trained: int
    heldout: int
    own: Choice
    others: list[Choice]

    @property
    def total(self) -> int:
        """Number of tokens."""
        return int(self.lengths.sum())

    @property
    def quantiles(self) -> dict[str, int]:
        """Lengths by quantile: of so many rows, the longest has that length."""
        lengths = np.sort(self.lengths)
        return {name: int(lengths[max(0, int(np.ceil(q * len(lengths))) - 1)]) for name, q in QUANTILES.items()}

    @property
    def packing_savings(self) -> float | None:
        """Share of the positions that packing saves at the run's own maximum length; None if either is not possible."""
        result = {
            choice.packing: choice.positions for choice in self.others if choice.max_length == self.own.max_length
        }
        return 1 - result[True] / result[False] if len(result) == 2 else None


def row_statistics(args: TrainingArguments, model: LoadedModel) -> RowStatistics:
    """Statistics of the training rows. Nothing is allocated on the device.

    Raises:
        UserError: the rows cannot be read, or do not fit the model.
    """
    counts: Counter[str] = Counter()
    args, _ = fit_length(args, model.config.max_position_embeddings)
    formats = _counting(formats_of(objective_of(args)), counts)
    whole, heldout = read_rows(replace(args, max_length=_WHOLE), model, sources_of(args), formats)
    estimate = packing_estimate(args, whole)
    alternatives = []
    for length in _lengths(whole, args.length, model.config.max_position_embeddings):
        for packing in (True, False):
            try:
                alternatives.append(packing_estimate(replace(args, max_length=length, packing=packing), whole))
            except UserError:  # no row has trained tokens left
                continue
    return RowStatistics(
        name=whole.path,
        summary=whole.summary(),
        formats=dict(counts.most_common()),
        lengths=np.array(whole.lengths),
        trained=whole.trained_tokens,
        heldout=len(heldout.rows) if heldout else 0,
        own=estimate,
        others=alternatives,
    )


def packing_estimate(args: TrainingArguments, whole: TokenizedData) -> Choice:
    """The estimate for rows that were not cut. Raises UserError if no row is left."""
    rows = shortened(whole, args)
    filled, _ = default_batches(args, group_lengths(rows), members=objective_of(args).rows_per_sample)
    stream = DataStream(rows, filled)
    epoch = stream.epoch(0)
    batches = [batch for step in epoch for batch in step]
    trained_tokens = sum(row.trained_tokens for row in rows.rows)
    return Choice(
        max_length=args.length,
        packing=filled.batching[0],
        cut=sum(length > args.length for length in whole.lengths),
        lost=len(whole.rows) - len(rows.rows),
        trained=trained_tokens / whole.trained_tokens,
        steps=len(epoch),
        tokens=sum(stream.lengths[sample] for batch in batches for sample in batch),
        positions=padded_tokens(stream, batches),
    )


def padded_tokens(stream: DataStream, batches: Sequence[Sequence[int]]) -> int:
    """Positions of batches, whose programs are recorded for a few sizes."""
    sizes = stream.buckets()
    lengths = [sum(stream.lengths[sample] for sample in batch) for batch in batches]
    return sum(next((size for size in sizes if size >= tokens), sizes[-1]) for tokens in lengths)


def _lengths(whole: TokenizedData, length: int, positions: int) -> list[int]:
    """Powers of two around the lengths of the rows, and the run's own maximum."""
    longest = min(positions, max(whole.lengths))
    powers = [SHORTEST]
    while powers[-1] < longest:
        powers.append(2 * powers[-1])
    return sorted({*(power for power in powers[-LENGTHS:] if power <= positions), length})


def _counting(formats: RowFormats[Sample], counts: Counter[str]) -> RowFormats[Sample]:
    """The same formats; counts the rows of each."""

    def counting(form: RowFormat[Sample]) -> RowFormat[Sample]:
        def read(row: Fields) -> Sample:
            sample = form.convert(row)
            counts[", ".join(form.required)] += 1
            return sample

        return replace(form, convert=read)

    return replace(formats, formats=tuple(map(counting, formats.formats)))


@dataclass(frozen=True)
class Token:
    """A token of a row. text: '' where it only begins or ends a character."""

    id: int
    text: str
    trained: bool


@dataclass(frozen=True)
class RowPreview:
    """How a row of the data is trained on.

    rows: tokens of each sequence that is trained on; a pair gives two, chosen and rejected. notes: what is left out of
    them or was changed. refusal: why nothing is trained on, or None.
    """

    position: RowPosition
    rows: list[list[Token]]
    notes: list[str]
    refusal: str | None = None


def preview_rows(
    args: TrainingArguments, model: ModelFiles, source: Source, numbers: Collection[int] = ()
) -> Iterator[RowPreview]:
    """Yield rows of a source as training with these options would read them.

    Args:
        numbers: of the rows, from 1; by default the first three. Those that the source does not have are left out.

    Raises:
        UserError: the data cannot be read, or the chat template is unusable.
    """
    args, _ = fit_length(replace(args, skip_bad_rows=False), model.config.max_position_embeddings)
    args = with_template_date(args, model)
    last, tools = max(numbers, default=3), tools_of(args)
    for number, (position, row) in enumerate(source.rows(formats_of(objective_of(args))), 1):
        if number in numbers or not numbers:
            yield _preview(args, model, _OneRow(source, position, row), tools)
        if number == last:
            return


def _preview(args: TrainingArguments, model: ModelFiles, data: _OneRow, tools: Tools | None) -> RowPreview:
    if isinstance(data.row, BadRow):
        return RowPreview(data.position, [], [], data.row.reason)
    try:
        prepared = prepared_for(args, model, data, tools=tools)
    except UserError as error:
        return RowPreview(data.position, [], [], str(error).removeprefix(f"{data.source.locate(data.position)}: "))
    notes = [note.removesuffix(f" ({data.position})") for note in prepared.account.outcomes(args.length)]
    return RowPreview(data.position, [_tokens(row, model.tokenizer) for row in prepared.rows], notes)


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
    position: RowPosition
    row: dict[str, Any] | BadRow

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def rows(self, formats: RowFormats[Any]) -> Rows:
        return iter([(self.position, self.row)])

    def digest(self) -> str | None:
        return None
