"""Statistics of the rows of a run: lengths, formats, trained tokens, and what options make of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from wgpu_lora.data import Prepared, Sample
from wgpu_lora.data.columns import Fields, RowFormat, RowFormats
from wgpu_lora.errors import UserError
from wgpu_lora.models.loaded import LoadedModel
from wgpu_lora.train.batching import fitted
from wgpu_lora.train.length import fit_length, shortened
from wgpu_lora.train.objectives import formats_of, objective_of
from wgpu_lora.train.options.arguments import TrainingArguments
from wgpu_lora.train.rows import read_rows, sources_of
from wgpu_lora.train.stream import DataStream, group_lengths

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
SHORTEST, LENGTHS = 64, 8  # tokens of the smallest --max-length that is tried, and how many are
_WHOLE = 2**31 - 1  # a --max-length that cuts nothing


@dataclass(frozen=True)
class Choice:
    """What a --max-length, with or without packing, makes of the rows.

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
        ordered = np.sort(self.lengths)
        return {name: int(ordered[max(0, int(np.ceil(q * len(ordered))) - 1)]) for name, q in QUANTILES.items()}

    @property
    def saved(self) -> float | None:
        """Share of the positions that packing saves at the run's own maximum length; None if either is not possible."""
        found = {one.packing: one.positions for one in self.others if one.max_length == self.own.max_length}
        return 1 - found[True] / found[False] if len(found) == 2 else None


def row_statistics(args: TrainingArguments, model: LoadedModel) -> RowStatistics:
    """Statistics of the training rows. Nothing is allocated on the device.

    Raises:
        UserError: the rows cannot be read, or do not fit the model.
    """
    counts: Counter[str] = Counter()
    args, _ = fit_length(args, model.config.max_position_embeddings)
    formats = _counting(formats_of(objective_of(args)), counts)
    whole, heldout = read_rows(replace(args, max_length=_WHOLE), model, sources_of(args), formats)
    own = choice_of(args, whole)
    others = []
    for length in _lengths(whole, args.length, model.config.max_position_embeddings):
        for packing in (True, False):
            try:
                others.append(choice_of(replace(args, max_length=length, packing=packing), whole))
            except UserError:  # no row has trained tokens left
                continue
    return RowStatistics(
        name=whole.path,
        summary=whole.summary(),
        formats=dict(counts.most_common()),
        lengths=np.array(whole.lengths),
        trained=whole.trained_tokens,
        heldout=len(heldout.rows) if heldout else 0,
        own=own,
        others=others,
    )


def choice_of(args: TrainingArguments, whole: Prepared) -> Choice:
    """What options make of rows that were not cut. Raises UserError if no row is left."""
    rows = shortened(whole, args)
    filled, _ = fitted(args, group_lengths(rows), members=objective_of(args).parts)
    stream = DataStream(rows, filled)
    epoch = stream.epoch(0)
    batches = [batch for step in epoch for batch in step]
    kept = sum(row.trained_tokens for row in rows.rows)
    return Choice(
        max_length=args.length,
        packing=filled.batching[0],
        cut=sum(length > args.length for length in whole.lengths),
        lost=len(whole.rows) - len(rows.rows),
        trained=kept / whole.trained_tokens,
        steps=len(epoch),
        tokens=sum(stream.lengths[sample] for batch in batches for sample in batch),
        positions=positions_of(stream, batches),
    )


def positions_of(stream: DataStream, batches: Sequence[Sequence[int]]) -> int:
    """Positions of batches, whose programs are recorded for a few sizes."""
    sizes = stream.buckets()
    needed = [sum(stream.lengths[sample] for sample in batch) for batch in batches]
    return sum(next((size for size in sizes if size >= tokens), sizes[-1]) for tokens in needed)


def _lengths(whole: Prepared, own: int, positions: int) -> list[int]:
    """Powers of two around the lengths of the rows, and the run's own maximum."""
    longest = min(positions, max(whole.lengths))
    powers = [SHORTEST]
    while powers[-1] < longest:
        powers.append(2 * powers[-1])
    return sorted({*(power for power in powers[-LENGTHS:] if power <= positions), own})


def _counting(formats: RowFormats[Sample], counts: Counter[str]) -> RowFormats[Sample]:
    """The same formats; counts the rows of each."""

    def counting(form: RowFormat[Sample]) -> RowFormat[Sample]:
        def read(row: Fields) -> Sample:
            sample = form.read(row)
            counts[", ".join(form.required)] += 1
            return sample

        return replace(form, read=read)

    return replace(formats, formats=tuple(map(counting, formats.formats)))
