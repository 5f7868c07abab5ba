"""The `tokenizers` library behind a small interface, which process.py implements in a child process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import tokenizers

Span = tuple[int, int]


class BackendError(Exception):
    """The library failed; the text says why."""


@dataclass(frozen=True)
class Added:
    """A token that is matched in a text before normalization and splitting."""

    id: int
    content: str
    special: bool


@dataclass(frozen=True)
class Facts:
    """Constant properties of a tokenizer."""

    vocab_size: int
    added: tuple[Added, ...]


class Backend(Protocol):
    """A loaded tokenizer.json. All methods raise BackendError.

    encode: token ids of each text; with `special`, including the special tokens that the post-processor adds.
    encode_with_offsets: token ids of each text, and the characters `[start, end)` of each id.
    """

    @property
    def facts(self) -> Facts: ...
    def encode(self, texts: Sequence[str], special: bool = False) -> list[list[int]]: ...
    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[Span]]]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...
    def token_to_id(self, token: str) -> int | None: ...
    def to_str(self) -> str: ...


@contextmanager
def guarded() -> Iterator[None]:
    """Raise the library's errors as BackendError: it raises plain Exception, or PanicException if Rust panics."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise BackendError(str(error)) from None


class Local:
    """The library in this process."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._processor = tokenizer.post_processor
        with guarded():
            vocabulary = tokenizer.get_vocab(with_added_tokens=True)
            added = tokenizer.get_added_tokens_decoder()
        self.facts = Facts(
            max(vocabulary.values(), default=-1) + 1,
            tuple(Added(id, token.content, token.special) for id, token in sorted(added.items())),
        )

    @classmethod
    def opened(cls, document: str) -> Local:
        with guarded():
            return cls(tokenizers.Tokenizer.from_str(document))

    def encode(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        return [self._encoded(text, special).ids for text in texts]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[Span]]]:
        return [(encoding.ids, encoding.offsets) for encoding in (self._encoded(text, False) for text in texts)]

    def _encoded(self, text: str, special: bool) -> tokenizers.Encoding:
        # The byte-level post-processor trims spaces from the offsets, which would put the first space of a turn
        # outside of its span, so it only runs when special tokens are wanted.
        with guarded():
            self._tokenizer.post_processor = self._processor if special else None
            try:
                return self._tokenizer.encode(text, add_special_tokens=special)
            finally:
                self._tokenizer.post_processor = self._processor

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        with guarded():
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        with guarded():
            return self._tokenizer.token_to_id(token)

    def to_str(self) -> str:
        with guarded():
            return self._tokenizer.to_str()
