"""From data to the rows that training reads, with an account of what became of every row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from wgpu_lora.data.account import Account
from wgpu_lora.data.empty import without_empty_answers
from wgpu_lora.data.files import file_source
from wgpu_lora.data.formats import Example, Tokens, parse_example
from wgpu_lora.data.masks import UNTRAINED, Pair, tokenize_examples
from wgpu_lora.data.source import Place, Problem, Source
from wgpu_lora.data.tokenizer import Tokenizer
from wgpu_lora.errors import UserError

_BLOCK_ROWS, _BLOCK_SIZE = 64, 1 << 19  # that are tokenised together, at most; characters
_Read = tuple[Place, dict[str, Any] | Problem, Example | None]


@dataclass(frozen=True, eq=False)
class Row:
    """One sequence to train on.

    input_ids, labels: int32, both [tokens]; labels unshifted, -100 where nothing is learnt.
    index: which row of the data this is, counting every row that an example gives, dropped ones too;
        random draws hang on it, so it must not change with `max_length`.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    index: int

    @property
    def trained_tokens(self) -> int:
        """Tokens that are predicted and learnt. Nothing predicts the first token, whatever its label."""
        return int(np.count_nonzero(self.labels[1:] != UNTRAINED))


@dataclass(frozen=True, eq=False)
class Prepared:
    """Data, ready to train on.

    path: what they are called. digest: sha256 of the file's bytes or of the rows, hexadecimal.
    account: what became of every row. notes: what a person should know of how they were read.
    trained_tokens, total_tokens: over `rows`.
    """

    path: str
    rows: list[Row]
    digest: str
    max_length: int
    account: Account
    trained_tokens: int
    total_tokens: int
    notes: tuple[str, ...] = ()

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(row.input_ids) for row in self.rows]

    def summary(self) -> str:
        """One line for a person: what was read, what was lost and what is learnt."""
        found = self.account.summary(len(self.rows), self.max_length)
        return f"{found}; {self.trained_tokens:,} of {self.total_tokens:,} tokens are learnt"


def prepare(
    data: Source | Path,
    tokenizer: Tokenizer | None,
    *,
    max_length: int,
    completion_only_loss: bool = True,
    on_overflow: Literal["truncate", "drop"] = "truncate",
    chat_template_kwargs: dict[str, Any] | None = None,
    vocab_size: int | None = None,
    skip_bad_rows: bool = False,
) -> Prepared:
    """Reads, tokenises and masks the rows of a source, or of a file.

    Args:
        tokenizer: None will do where all rows are tokenised already.
        max_length: tokens of the longest row; longer ones are cut at the end or dropped, as `on_overflow` says.
        vocab_size: rows of the model's embedding; the tokenizer's vocabulary where it is not given.
        skip_bad_rows: go on without the rows that cannot be used; the account has them.

    Raises:
        UserError: the source cannot be read, rows of it are wrong (with their places) or have a token outside of the
            vocabulary, or no row is left to train on.
    """
    if max_length < 2:
        raise UserError(f"The greatest length is {max_length} tokens, but a row needs two to learn one from the other.")
    if on_overflow not in ("truncate", "drop"):
        raise UserError(f"on_overflow is {on_overflow!r}, but rows that are too long can only 'truncate' or 'drop'.")
    if vocab_size is None and tokenizer is not None:
        vocab_size = tokenizer.vocab_size
    source = file_source(data) if isinstance(data, Path) else data
    account = Account(source, keep_bad=skip_bad_rows)
    rows: list[Row] = []
    for block in _blocks(source, account, completion_only_loss):
        examples = [example for _, _, example in block if example is not None]
        found = iter(tokenize_examples(examples, tokenizer, completion_only_loss, chat_template_kwargs))
        for place, row, example in block:
            pairs = [] if example is None else next(found)
            wrong = str(pairs) if isinstance(pairs, UserError) else _outside(pairs, vocab_size)
            if wrong:
                account.add_bad(place, Problem(wrong, row))
            if wrong or example is None:
                account.expanded += 1  # an index must not hang on what becomes of other rows
                continue
            assert not isinstance(pairs, UserError)
            kept = list(_kept(pairs, place, account, max_length, on_overflow == "drop"))
            if skip_bad_rows or not account.bad:
                rows += kept
    digest = account.close()
    if not skip_bad_rows:
        account.refuse_bad()
    if not rows:
        account.refuse_nothing(max_length)
    return Prepared(
        path=source.path,
        rows=rows,
        digest=digest,
        max_length=max_length,
        account=account,
        trained_tokens=sum(row.trained_tokens for row in rows),
        total_tokens=sum(len(row.input_ids) for row in rows),
        notes=source.notes,
    )


def _kept(pairs: list[Pair], place: Place, account: Account, max_length: int, drop: bool) -> Iterator[Row]:
    """The rows of an example that there is something to learn in, no longer than they may be."""
    for ids, labels in pairs:
        row = Row(np.asarray(ids, np.int32), np.asarray(labels, np.int32), account.expanded)
        account.expanded += 1
        if row.trained_tokens == 0:
            account.untrained.add(place)
            continue
        if len(ids) > max_length:
            if drop:
                account.too_long.add(place)
                continue
            row = Row(row.input_ids[:max_length].copy(), row.labels[:max_length].copy(), row.index)
            if row.trained_tokens == 0:
                account.untrained.add(place)
                account.lost_by_cut.add(place)
                continue
            account.cut.add(place)
        yield row


def _blocks(source: Source, account: Account, completion_only_loss: bool) -> Iterator[list[_Read]]:
    """Rows that are tokenised together; None is the example of one with nothing to tokenise, which is accounted for."""
    block: list[_Read] = []
    size = 0
    for place, row in source.rows():
        account.examples += 1
        example = _example(place, row, account, completion_only_loss)
        block.append((place, row, example))
        size += 0 if example is None else _size(example)
        if len(block) >= _BLOCK_ROWS or size >= _BLOCK_SIZE:
            yield block
            block, size = [], 0
    if block:
        yield block


def _example(place: Place, row: dict[str, Any] | Problem, account: Account, completion_only: bool) -> Example | None:
    try:
        problem = row if isinstance(row, Problem) else account.note(place, row)
        example = None if isinstance(row, Problem) or problem else parse_example(row)
    except UserError as error:
        problem, example = Problem(str(error), row), None
    if problem:
        account.add_bad(place, problem)
    if example is None:
        return None
    kept, silent = without_empty_answers(example, completion_only)
    if kept is None:
        account.empty.add(place)
    if silent:
        account.silent.add(place, silent)
    return kept


def _size(example: Example) -> int:
    """About as many characters as there are in it."""
    if isinstance(example, Tokens):
        return 8 * len(example.input_ids)
    try:
        return len(str(vars(example)))
    except RecursionError:
        return _BLOCK_SIZE


def _outside(pairs: list[Pair], vocab_size: int | None) -> str | None:
    """What is wrong where a token lies outside of the vocabulary."""
    greatest = max((max(part, default=-1) for pair in pairs for part in pair), default=-1)
    if vocab_size is None or greatest < vocab_size:
        return None
    return (
        f"token id {greatest} lies outside of the vocabulary of {vocab_size}; "
        "the data or the tokenizer belongs to another model."
    )
