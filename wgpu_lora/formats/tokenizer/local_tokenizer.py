"""The tokenizers library and chat templates, behind methods that `TokenizerProcess` has in a child process, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import tokenizers

from wgpu_lora.formats.tokenizer import chat_template
from wgpu_lora.formats.tokenizer.chat_template import Span
from wgpu_lora.formats.tokenizer.tokenizer_json import TokenizerError, normalize_document

MAX_ID = 1 << 22  # sixteen times the largest vocabularies; arrays elsewhere are sized by it


@dataclass(frozen=True)
class AddedToken:
    """A token that is matched in a text before normalization and splitting."""

    id: int
    content: str
    special: bool


@dataclass(frozen=True)
class TokenizerInfo:
    """Constant properties of a tokenizer. vocab_size: largest token id plus one. notes: for the user."""

    vocab_size: int
    added: tuple[AddedToken, ...]
    notes: tuple[str, ...] = ()


@contextmanager
def library_errors() -> Iterator[None]:
    """Raise the library's errors as TokenizerError: it raises plain Exception, or PanicException if Rust panics."""
    try:
        yield
    except MemoryError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{error!s:.500}") from None


class LocalTokenizer:
    """A tokenizer, and chat templates, in this process. All methods raise TokenizerError."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, notes: Sequence[str] = ()) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._processor = tokenizer.post_processor
        with library_errors():
            vocabulary = tokenizer.get_vocab(with_added_tokens=True)
            added_tokens = tokenizer.get_added_tokens_decoder()
        if (max_id := max([-1, *vocabulary.values(), *added_tokens])) > MAX_ID:
            raise TokenizerError(f"it has a token id beyond {MAX_ID:,}")
        tokens = (AddedToken(id, token.content, token.special) for id, token in sorted(added_tokens.items()))
        self.info = TokenizerInfo(max_id + 1, tuple(tokens), tuple(notes))

    @classmethod
    def open(
        cls, document: str, added_tokens: Sequence[Mapping[str, Any]] = (), normalized: bool = False
    ) -> LocalTokenizer:
        """Read a tokenizer.json; see `normalize_document`. normalized: it is one that this package has written."""
        text, notes = (document, []) if normalized else normalize_document(document, added_tokens)
        with library_errors():
            return cls(tokenizers.Tokenizer.from_str(text), notes)

    def call(self, method: str, *arguments: Any) -> Any:
        """The value of a method, by name, as `TokenizerProcess` has it."""
        return getattr(self, method)(*arguments)

    def encode(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        """Token ids of each text; with `special`, including the special tokens that the post-processor adds."""
        return [self._encoded(text, special).ids for text in texts]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids of a text, and the first character and the end of each id, one after the other."""
        encoding = self._encoded(text, False)
        return encoding.ids, list(chain.from_iterable(encoding.offsets))

    def _encoded(self, text: str, special: bool) -> tokenizers.Encoding:
        # The byte-level post-processor trims spaces from the offsets, which would put the first space of a turn
        # outside of its span, so it only runs when special tokens are wanted.
        with library_errors():
            self._tokenizer.post_processor = self._processor if special else None
            try:
                return self._tokenizer.encode(text, add_special_tokens=special)
            finally:
                self._tokenizer.post_processor = self._processor

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        with library_errors():
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        with library_errors():
            return self._tokenizer.token_to_id(token)

    def to_json(self) -> str:
        """The tokenizer.json, as the library writes it."""
        with library_errors():
            return self._tokenizer.to_str()

    def render(self, *arguments: Any) -> tuple[str, list[Span]]:
        """See `chat_template.render`."""
        return chat_template.render(*arguments)
