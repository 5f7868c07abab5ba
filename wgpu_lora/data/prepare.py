"""From a data file to the rows that training reads, with an account of what became of every row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from wgpu_lora.data.formats import Example, Tokens, read_examples
from wgpu_lora.data.masks import UNTRAINED, Pair, tokenize_examples
from wgpu_lora.data.tokenizer import Tokenizer
from wgpu_lora.errors import UserError
from wgpu_lora.formats.atomic import file_digest

_BLOCK_LINES, _BLOCK_SIZE = 64, 1 << 19  # that are tokenised together, at most; characters


@dataclass(frozen=True, eq=False)
class Row:
    """One sequence to train on.

    input_ids, labels: int32, both [tokens]; labels unshifted, -100 where nothing is learnt.
    index: which row of the file this is, counting every row that an example gives, dropped ones too;
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
    """A data file, ready to train on.

    digest: sha256 of the file's bytes, hexadecimal.
    examples: rows in the file. expanded: rows that they gave (more, where a conversation gives one for each turn).
    cut: rows kept, cut to the greatest length. too_long: rows dropped for their length.
    untrained: rows dropped because nothing is learnt in them. lost_by_cut: those of them that the cut left so.
    trained_tokens, total_tokens: over `rows`.
    """

    path: Path
    rows: list[Row]
    digest: str
    max_length: int
    examples: int
    expanded: int
    cut: int
    too_long: int
    untrained: int
    lost_by_cut: int
    trained_tokens: int
    total_tokens: int

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(row.input_ids) for row in self.rows]

    def summary(self) -> str:
        """One line for a person: what was read, what was lost and what is learnt."""
        parts = [f"{self.path.name}: {self.examples:,} examples, {len(self.rows):,} rows"]
        if self.cut:
            parts.append(f"{self.cut:,} cut at {self.max_length:,} tokens")
        if self.too_long:
            parts.append(f"{self.too_long:,} dropped as longer than {self.max_length:,} tokens")
        if self.untrained:
            by_cut = f" ({self.lost_by_cut:,} of them by the cut)" if self.lost_by_cut else ""
            parts.append(f"{self.untrained:,} dropped with nothing to learn{by_cut}")
        return f"{', '.join(parts)}; {self.trained_tokens:,} of {self.total_tokens:,} tokens are learnt"


def prepare(
    path: Path,
    tokenizer: Tokenizer | None,
    *,
    max_length: int,
    completion_only_loss: bool = True,
    on_overflow: Literal["truncate", "drop"] = "truncate",
    chat_template_kwargs: dict[str, Any] | None = None,
    vocab_size: int | None = None,
) -> Prepared:
    """Reads, tokenises and masks a JSONL file.

    Args:
        tokenizer: None will do where all rows are tokenised already.
        max_length: tokens of the longest row; longer ones are cut at the end or dropped, as `on_overflow` says.
        vocab_size: rows of the model's embedding; the tokenizer's vocabulary where it is not given.

    Raises:
        UserError: the file or one of its rows is wrong (with the line), a token lies outside of the vocabulary,
            or no row is left to train on.
    """
    path = Path(path)
    if max_length < 2:
        raise UserError(f"The greatest length is {max_length} tokens, but a row needs two to learn one from the other.")
    if on_overflow not in ("truncate", "drop"):
        raise UserError(f"on_overflow is {on_overflow!r}, but rows that are too long can only 'truncate' or 'drop'.")
    if vocab_size is None and tokenizer is not None:
        vocab_size = tokenizer.vocab_size
    rows: list[Row] = []
    examples = expanded = cut = too_long = untrained = lost_by_cut = 0
    for line, pairs in _tokenized(path, tokenizer, completion_only_loss, chat_template_kwargs):
        examples += 1
        try:
            for ids, labels in pairs:
                _check_vocabulary(ids, labels, vocab_size)
        except UserError as error:
            raise UserError(f"{path}, line {line}: {error}") from error
        for ids, labels in pairs:
            row = Row(np.asarray(ids, np.int32), np.asarray(labels, np.int32), expanded)
            expanded += 1
            if row.trained_tokens == 0:
                untrained += 1
                continue
            if len(ids) > max_length:
                if on_overflow == "drop":
                    too_long += 1
                    continue
                row = Row(row.input_ids[:max_length].copy(), row.labels[:max_length].copy(), row.index)
                if row.trained_tokens == 0:
                    untrained += 1
                    lost_by_cut += 1
                    continue
                cut += 1
            rows.append(row)
    if not rows:
        raise UserError(
            f"{path} leaves nothing to train on: of {expanded:,} rows {untrained:,} have no token to learn "
            f"({lost_by_cut:,} of them after the cut at {max_length:,} tokens) and {too_long:,} are too long; "
            "check that there are answers in it, or raise the greatest length."
        )
    return Prepared(
        path=path,
        rows=rows,
        digest=file_digest(path),
        max_length=max_length,
        examples=examples,
        expanded=expanded,
        cut=cut,
        too_long=too_long,
        untrained=untrained,
        lost_by_cut=lost_by_cut,
        trained_tokens=sum(row.trained_tokens for row in rows),
        total_tokens=sum(len(row.input_ids) for row in rows),
    )


def _tokenized(
    path: Path, tokenizer: Tokenizer | None, completion_only_loss: bool, chat_template_kwargs: dict[str, Any] | None
) -> Iterator[tuple[int, list[Pair]]]:
    """Every line's number and rows, some lines at a time; a mistake comes after what stands before it."""
    lines = read_examples(path)
    wrong: UserError | None = None
    while wrong is None:
        block: list[tuple[int, Example]] = []
        size = 0
        try:
            for line, example in lines:
                block.append((line, example))
                size += _size(example)
                if len(block) >= _BLOCK_LINES or size >= _BLOCK_SIZE:
                    break
        except UserError as error:
            wrong = error
        if not block:
            break
        examples = [example for _, example in block]
        found = tokenize_examples(examples, tokenizer, completion_only_loss, chat_template_kwargs)
        for (line, _), pairs in zip(block, found, strict=True):
            if isinstance(pairs, UserError):
                raise UserError(f"{path}, line {line}: {pairs}") from pairs
            yield line, pairs
    if wrong:
        raise wrong


def _size(example: Example) -> int:
    """About as many characters as there are in it."""
    if isinstance(example, Tokens):
        return 8 * len(example.input_ids)
    try:
        return len(str(vars(example)))
    except RecursionError:
        return _BLOCK_SIZE


def _check_vocabulary(ids: list[int], labels: list[int], vocab_size: int | None) -> None:
    greatest = max(max(ids, default=-1), max(labels, default=-1))
    if vocab_size is not None and greatest >= vocab_size:
        raise UserError(
            f"token id {greatest} lies outside of the vocabulary of {vocab_size}; "
            "the data or the tokenizer belongs to another model."
        )
