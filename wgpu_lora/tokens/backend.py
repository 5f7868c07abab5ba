"""The `tokenizers` library behind the few calls that are made of it, so that they can be made in a child as well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import tokenizers

Span = tuple[int, int]


class BackendError(Exception):
    """The library does not do what it is asked to; the text says why."""


@dataclass(frozen=True)
class Added:
    """A token that is found in a text before anything else."""

    id: int
    content: str
    special: bool


@dataclass(frozen=True)
class Facts:
    """What does not change: the number of ids, and the added tokens."""

    vocab_size: int
    added: tuple[Added, ...]


class Backend(Protocol):
    """A tokenizer.json at work. All of it raises BackendError.

    encode: with `special`, also what is put around a text.
    encode_with_offsets: ids, and the characters `[start, end)` of each.
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
    """The library raises plain Exception, and where Rust panics not even that."""
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
        # Post-processors add special tokens, but the byte-level one also trims spaces off the offsets,
        # which would put a turn's first space outside of its span. Plain encoding goes without.
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
