"""Read, tokenise and mask data for training."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil

from wgpu_lora.data.example_formats import EXAMPLES
from wgpu_lora.data.row_counts import RowCounts
from wgpu_lora.data.row_files import file_source
from wgpu_lora.data.row_formats import RowFormats
from wgpu_lora.data.source import BadRow, RowPosition, Source
from wgpu_lora.data.validation_split import row_key, validation_mask
from wgpu_lora.errors import UserError
from wgpu_lora.formats.tokenizer.chat_template import LimitError
from wgpu_lora.formats.tokenizer.conversation_rows import UNTRAINED, Pair
from wgpu_lora.formats.tokenizer.examples import Example, Sample, Tokens, prompt_format, without_empty_answers
from wgpu_lora.formats.tokenizer.label_mask import tokenize_examples
from wgpu_lora.formats.tokenizer.tokenizer import Tokenizer
from wgpu_lora.names.spelling import setting
from wgpu_lora.names.text import count_noun

_BLOCK_ROWS, _BLOCK_SIZE = 64, 1 << 19  # rows and characters that are tokenised together, at most
MAX_BAD = 1000  # unusable rows after which reading ends, unless they are skipped
_ROW_BYTES, _TOKEN_BYTES, _BAD_BYTES = 400, 8, 1000  # memory of a row, of its tokens and of a row that is skipped
_Read = tuple[RowPosition, dict[str, Any] | BadRow, Sample | None, int]


@dataclass(frozen=True, eq=False)
class Row:
    """A sequence to train on.

    input_ids, labels: int32, both [tokens]; labels are unshifted, -100 for tokens that are not trained on.
    index: number of the row in the data, counting all rows of all examples, including dropped ones. Random numbers
        depend on it, so it must not change with `max_length`.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    index: int

    @property
    def trained_tokens(self) -> int:
        """Number of trained tokens. The first token is never predicted, so its label does not count."""
        return int(np.count_nonzero(self.labels[1:] != UNTRAINED))


@dataclass(frozen=True, eq=False)
class TokenizedData:
    """Data, ready to train on.

    path: name of the data. digest: SHA-256 of the file's bytes or of the rows, hexadecimal.
    parts: number of consecutive rows in a sample. prompt_format: how prompts are worded; None if they differ or there
        are none. values: one for each sample; empty if the data have none.
    columns: of the row of each sample, for rewards; empty if the format keeps none.
    keys: u64 [samples], of the rows that they were made of; equal for equal rows.
    longest_fork: longest rows of a sample that share the rows of a batch for their common prompt; None for any.
    account: counts of rows by outcome. notes: for the user, about how the data were read.
    trained_tokens, total_tokens: over `rows`.
    """

    path: str
    rows: list[Row]
    digest: str
    max_length: int
    account: RowCounts
    trained_tokens: int
    total_tokens: int
    notes: tuple[str, ...] = ()
    parts: int = 1
    prompt_format: str | None = None
    values: tuple[float, ...] = ()
    columns: tuple[dict[str, Any], ...] = ()
    keys: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    longest_fork: int | None = 0

    @cached_property
    def prefixes(self) -> list[int]:
        """Leading tokens that the second row of each sample shares with the first in a batch; 0 for other rows."""
        return [common_prefix(rows, self.longest_fork) for rows in self.samples]

    def tokens(self, sample: int) -> int:
        """Rows that a sample takes in a batch."""
        return sum(len(row.input_ids) for row in self.samples[sample]) - self.prefixes[sample]

    @cached_property
    def samples(self) -> list[list[Row]]:
        """Rows grouped by sample."""
        return [self.rows[start : start + self.parts] for start in range(0, len(self.rows), self.parts)]

    def value(self, sample: int) -> float:
        return self.values[sample] if self.values else 1.0

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(row.input_ids) for row in self.rows]

    def summary(self) -> str:
        """One line with counts of rows and tokens."""
        noun = "row" if self.parts == 1 else "pair"
        result = self.account.summary(count_noun(len(self.samples), noun), self.max_length)
        if self.columns:
            return f"{result}; {self.total_tokens:,} tokens of prompts"
        return f"{result}; {self.trained_tokens:,} of {self.total_tokens:,} tokens are trained on"


def common_prefix(rows: Sequence[Row], longest: int | None = None) -> int:
    """Leading tokens that two rows have in common and that predict no trained token.

    It is 0 if there are not two rows, or if one of them is longer than `longest`.
    """
    lengths = [len(row.input_ids) for row in rows]
    if len(rows) != 2 or (longest is not None and max(lengths) > longest):
        return 0
    size, (first, second) = min(lengths), rows
    differing = np.flatnonzero(first.input_ids[:size] != second.input_ids[:size])
    trained = [np.flatnonzero(row.labels[1:] != UNTRAINED) for row in (first, second)]
    return min([size - 1, *(int(item[0]) for item in (differing, *trained) if item.size)])


def tokenize_source(
    data: Source | Path,
    tokenizer: Tokenizer | None,
    *,
    max_length: int,
    completion_only_loss: bool = True,
    on_overflow: Literal["truncate", "drop"] = "truncate",
    chat_template_kwargs: dict[str, Any] | None = None,
    vocab_size: int | None = None,
    skip_bad_rows: bool = False,
    formats: RowFormats[Sample] = EXAMPLES,
    parts: int = 1,
    cut: Cut | None = None,
) -> TokenizedData:
    """Read, tokenise and mask the rows of a source or a file.

    Args:
        tokenizer: may be None if all rows are tokenised.
        max_length: in tokens; longer rows are truncated at the end or dropped, according to `on_overflow`.
        vocab_size: rows of the model's embedding; by default the size of the tokenizer's vocabulary.
        skip_bad_rows: skip unusable rows, and keep them in the account.
        formats, parts: the accepted formats of rows, and the number of examples that they give per sample.
        cut: how longer rows are cut, by default at the end. With it, a row that it leaves without an answer or a pair
            that it makes equal is an error, like a row that cannot be read.

    Raises:
        UserError: the source cannot be read, rows are invalid (with their positions) or have a token outside of the
            vocabulary, or no row is left to train on.
    """
    if max_length < 2:
        raise UserError(f"The maximum length is {max_length} tokens, but training needs rows of at least 2: raise it.")
    if on_overflow not in ("truncate", "drop"):
        raise UserError(f"on_overflow must be 'truncate' or 'drop', not {on_overflow!r}.")
    if vocab_size is None and tokenizer is not None:
        vocab_size = tokenizer.vocab_size
    source = file_source(data) if isinstance(data, Path) else data
    account = RowCounts(source, keep_bad=skip_bad_rows)
    rows: list[Row] = []
    values: list[float] = []
    columns: list[dict[str, Any]] = []
    keys = array("Q")
    forms: set[str | None] = set()
    tokens, most_bytes = 0, psutil.virtual_memory().total // 2
    for block in _blocks(source, account, completion_only_loss, formats):
        examples = [example for _, _, sample, _ in block if sample for example in sample.examples]
        result = tokenize_examples(examples, tokenizer, completion_only_loss, chat_template_kwargs)
        for position, row, sample, key in block:
            assert sample is None or len(sample.examples) == parts
            templated = tokenizer is not None and tokenizer.has_chat_template
            forms |= {prompt_format(example, templated) for example in (sample.examples if sample else ())}
            pairs: list[Pair] = []
            wrong = None
            for _ in sample.examples if sample else ():
                try:
                    expanded = next(result)
                except LimitError as error:
                    raise LimitError(f"{source.path}, {position}: {error}") from error
                if isinstance(expanded, UserError):
                    wrong = str(expanded)
                    continue
                account.note_text(position, expanded)
                if parts > 1 and len(expanded.pairs) != 1:
                    wrong = (
                        "the chat template gives a separate row for each turn, so the conversation has no single answer"
                    )
                else:
                    wrong = wrong or _outside(expanded.pairs, vocab_size)
                    pairs += expanded.pairs
            if cut and sample and not wrong:
                whole, pairs = pairs, _shorter(pairs, cut, max_length, on_overflow == "drop")
                wrong = unusable(whole, pairs) if all(len(ids) <= max_length for ids, _ in pairs) else None
                if sum(len(ids) for ids, _ in pairs) < sum(len(ids) for ids, _ in whole) and not wrong:
                    account.cut.add(position)
            if wrong:
                account.add_bad(position, BadRow(wrong, row))
            if wrong or sample is None:
                account.expanded += 1  # an index must not depend on the outcome of other rows
                continue
            sample_rows = list(_fitting_rows(pairs, position, account, max_length, on_overflow == "drop"))
            if parts > 1 and len(sample_rows) < parts:
                sample_rows = []  # a sample is only useful as a whole
            if skip_bad_rows or not account.bad:
                rows += sample_rows
                values += [sample.value] * (len(sample_rows) // parts)
                columns += [sample.columns] * (len(sample_rows) // parts) if sample.columns is not None else []
                keys.extend([key] * (len(sample_rows) // parts))
                tokens += sum(len(row.input_ids) for row in sample_rows)
        if account.bad_count >= MAX_BAD and not skip_bad_rows:
            account.incomplete = True
            break
        if _ROW_BYTES * len(rows) + _TOKEN_BYTES * tokens + _BAD_BYTES * len(account.bad) > most_bytes:
            raise UserError(
                f"{source.display_name} does not fit in memory: {count_noun(account.examples, 'row')} of it take more "
                f"than {most_bytes / (1 << 30):,.1f} GiB, half of this machine's memory; train on a part of it."
            )
    digest = account.finish()
    if not skip_bad_rows:
        account.refuse_bad()
    if not rows:
        account.refuse_nothing(max_length)
    return TokenizedData(
        path=source.path,
        rows=rows,
        digest=digest,
        max_length=max_length,
        account=account,
        trained_tokens=sum(row.trained_tokens for row in rows),
        total_tokens=tokens,
        notes=source.notes,
        parts=parts,
        prompt_format=next(iter(forms)) if len(forms) == 1 else None,
        values=tuple(values) if set(values) - {1.0} else (),
        columns=tuple(columns),
        keys=np.array(keys, np.uint64),
    )


def _shorter(pairs: list[Pair], cut: Cut, max_length: int, drop: bool) -> list[Pair]:
    """The rows of a sample as `cut` leaves them; those that are to be dropped may still be too long."""
    return [cut(ids, labels, len(ids) if drop else max_length) for ids, labels in pairs]


def _fitting_rows(
    pairs: list[Pair], position: RowPosition, account: RowCounts, max_length: int, drop: bool
) -> Iterator[Row]:
    """The rows of an example that have trained tokens, truncated to the maximum length."""
    for ids, labels in pairs:
        row = Row(np.asarray(ids, np.int32), np.asarray(labels, np.int32), account.expanded)
        account.expanded += 1
        if row.trained_tokens == 0:
            account.untrained.add(position)
            continue
        if len(ids) > max_length:
            if drop:
                account.too_long.add(position)
                continue
            row = Row(row.input_ids[:max_length].copy(), row.labels[:max_length].copy(), row.index)
            if row.trained_tokens == 0:
                account.untrained.add(position)
                account.truncated_away.add(position)
                continue
            account.cut.add(position)
        yield row


def _blocks(
    source: Source, account: RowCounts, completion_only_loss: bool, formats: RowFormats[Sample]
) -> Iterator[list[_Read]]:
    """Yield blocks of rows to tokenise together; the sample is None for rows that are already accounted for."""
    block: list[_Read] = []
    size = 0
    for position, row in source.rows(formats):
        account.examples += 1
        sample, key = _sample(position, row, account, completion_only_loss, formats)
        block.append((position, row, sample, key))
        size += sum(map(_size, sample.examples)) if sample else 0
        if len(block) >= _BLOCK_ROWS or size >= _BLOCK_SIZE:
            yield block
            block, size = [], 0
    if block:
        yield block


def _sample(
    position: RowPosition,
    row: dict[str, Any] | BadRow,
    account: RowCounts,
    completion_only: bool,
    formats: RowFormats[Sample],
) -> tuple[Sample | None, int]:
    """The sample of a row, and the row's key."""
    noted = row if isinstance(row, BadRow) else account.add_row(position, row)
    sample: Sample | None = None
    unused: list[str] = []
    if not isinstance(row, BadRow) and not isinstance(noted, BadRow):
        try:
            sample, unused = formats.read_with_notes(row)
        except UserError as error:
            noted = BadRow(str(error), row)
    if isinstance(noted, BadRow):
        account.add_bad(position, noted)
        return None, 0
    assert sample is not None
    for note in unused:
        account.remark(position, note)
    examples = []
    for example in sample.examples:
        trimmed, silent = without_empty_answers(example, completion_only)
        if silent:
            account.empty_turns.add(position, silent)
        if trimmed is None:
            account.empty.add(position)
            return None, 0
        examples.append(trimmed)
    return replace(sample, examples=tuple(examples)), row_key(noted)


def _size(example: Example) -> int:
    """Approximate number of characters."""
    if isinstance(example, Tokens):
        return 8 * len(example.input_ids)
    try:
        return len(str(vars(example)))
    except RecursionError:
        return _BLOCK_SIZE


def _outside(pairs: list[Pair], vocab_size: int | None) -> str | None:
    """The error if a token is outside of the vocabulary, else None."""
    greatest = max((max(part, default=-1) for pair in pairs for part in pair), default=-1)
    if vocab_size is None or greatest < vocab_size:
        return None
    return (
        f"token id {greatest} is outside of the vocabulary of {vocab_size}; "
        "the data or the tokenizer belongs to another model."
    )


KEEP_START, KEEP_END = "keep_start", "keep_end"


@dataclass(frozen=True)
class Cut:
    """Limits of a row whose first trained token begins its answer, which is all that follows, as in TRL: also what a
    chat template adds behind the end of a turn.

    prompt: a longer prompt loses its beginning. answer: a longer answer loses its end. mode: which part a row that is
    then still too long keeps, its beginning (KEEP_START) or its end (KEEP_END).
    """

    prompt: int | None = None
    answer: int | None = None
    mode: str = KEEP_START

    def __call__(self, ids: list[int], labels: list[int], length: int) -> tuple[list[int], list[int]]:
        """A row of at most `length` tokens."""
        prompt_length = prompt_tokens(labels)
        labels = labels[:prompt_length] + ids[prompt_length:]
        first = max(0, prompt_length - self.prompt) if self.prompt else 0
        stop = min(len(ids), prompt_length + self.answer) if self.answer else len(ids)
        if stop - first > length:
            first, stop = (first, first + length) if self.mode == KEEP_START else (stop - length, stop)
        return ids[first:stop], labels[first:stop]


def prompt_tokens(labels: Iterable[int]) -> int:
    """The number of tokens before the first trained one."""
    count = 0
    for label in labels:
        if label != UNTRAINED:
            break
        count += 1
    return count


def unusable(pairs: list[tuple[list[int], list[int]]], cut: list[tuple[list[int], list[int]]]) -> str | None:
    """Why a sample cannot be trained on after its rows have been cut; None if it can."""
    for labels in (row[1] for row in cut):
        if all(label == UNTRAINED for label in labels[1:]):
            return "the prompt fills the whole length, so that nothing of the answer is left"
    if len(cut) > 1 and all(row == cut[0] for row in cut[1:]):
        shortened = any(len(row[0]) > len(short[0]) for row, short in zip(pairs, cut, strict=True))
        where = "where the length cuts them" if shortened else "as tokens"
        return f"the chosen and the rejected answer are equal {where}"
    return None


def split_validation(prepared: TokenizedData, amount: float, seed: int) -> tuple[TokenizedData, TokenizedData]:
    """Split samples: (to train on, held out). Equal rows, and the samples made of one row, stay together.

    Args:
        amount: share or number of the samples to hold out.

    Raises:
        UserError: there are too few samples.
    """
    mask = validation_mask(prepared.keys, amount, seed)
    count, total = int(mask.sum()), len(mask)
    note = f"{count:,} of {count_noun(total, 'row')} are held out ({setting('validation_split', amount)})"
    train = _subset(prepared, ~mask, notes=(*prepared.notes, note))
    source = prepared.account.source
    identity = np.sort(prepared.keys[mask]).tobytes()
    if source.is_sealed:  # records have the digest, by which somebody could try what the rows are
        identity = f"{prepared.digest} {amount} {seed}".encode()
    digest = hashlib.sha256(identity).hexdigest()
    return train, _subset(prepared, mask, digest=digest, account=RowCounts(source, examples=count), notes=())


def _subset(prepared: TokenizedData, mask: np.ndarray, **changes: Any) -> TokenizedData:
    """Some of the samples."""
    indices = np.flatnonzero(mask).tolist()
    rows = [row for sample in indices for row in prepared.samples[sample]]
    return replace(
        prepared,
        rows=rows,
        values=tuple(prepared.values[sample] for sample in indices) if prepared.values else (),
        columns=tuple(prepared.columns[sample] for sample in indices) if prepared.columns else (),
        keys=prepared.keys[mask],
        trained_tokens=sum(row.trained_tokens for row in rows),
        total_tokens=sum(len(row.input_ids) for row in rows),
        **changes,
    )
