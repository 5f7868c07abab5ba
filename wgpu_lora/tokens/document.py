"""Read and validate a tokenizer.json before the library sees it.

The library gets the validated document written out again, so that differences between JSON parsers do not matter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wgpu_lora.bounded import object_with_unique_keys
from wgpu_lora.tokens.components import (
    DECODERS,
    MAX_ID,
    NORMALIZERS,
    PRE_TOKENIZERS,
    PROCESSORS,
    Chain,
    DocumentError,
    Fields,
    boolean,
    check_chain,
    check_fields,
    require,
    text,
    text_or_null,
    whole,
)

MAX_BYTES = 64 << 20  # the largest vocabularies take half of it
MAX_VALUES = 4 << 20  # commas and opening brackets; the largest have 2.7 million
MAX_TOKEN = 1024  # characters
MAX_VOCABULARY = 1 << 20
MAX_ADDED = 1 << 18
MAX_WORD = 1000  # characters of a word for WordPiece, whose work may be cubic

_WORDS = f"the tokenizer reads words of up to {MAX_WORD:,} characters only; longer ones become unknown tokens."
_FIELDS = "the tokenizer has unknown fields, which are ignored."
_DROPOUT = "the tokenizer's dropout of merges is ignored: splitting is deterministic."


@dataclass(frozen=True)
class Document:
    """A validated tokenizer: its JSON, and notes for the user."""

    text: str
    notes: tuple[str, ...] = ()


def read_document(path: Path, added_tokens: Sequence[Mapping[str, Any]] = ()) -> Document:
    """Read and validate a tokenizer.json. Raises DocumentError.

    Args:
        added_tokens: further added tokens, with `content` and optionally `id` and attributes.
    """
    regular = path.is_file() and path.stat().st_size <= MAX_BYTES
    require(regular, f"it is not a regular file of at most {MAX_BYTES:,} bytes")
    with path.open("rb") as file:
        data = file.read(path.stat().st_size)
    require(sum(map(data.count, (b"[", b"{", b","))) <= MAX_VALUES, f"it has more than {MAX_VALUES:,} values")
    try:
        stated = json.loads(data.decode(), object_pairs_hook=object_with_unique_keys, parse_constant=_no_constant)
    except RecursionError:
        raise DocumentError("it is nested too deeply") from None
    except ValueError as error:
        raise DocumentError(f"it is not JSON: {error}") from None
    return checked(_with_added(stated, added_tokens) if added_tokens else stated)


def _with_added(stated: Any, added_tokens: Sequence[Mapping[str, Any]]) -> Any:
    """The document with further added tokens, numbered as the tokenizers library does. Raises DocumentError."""
    if not isinstance(stated, dict) or not isinstance(model := stated.get("model"), dict):
        return stated  # is refused when it is validated
    entries, vocabulary = stated.get("added_tokens") or [], model.get("vocab") or {}
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        return stated
    pieces = (
        vocabulary if isinstance(vocabulary, dict) else {entry[0]: i for i, entry in enumerate(vocabulary) if entry}
    )
    found = {entry.get("content"): entry for entry in entries}
    following = max([len(vocabulary) - 1, *(id for entry in entries if type(id := entry.get("id")) is int)]) + 1
    for token in added_tokens:
        content, special = token["content"], bool(token.get("special"))
        attributes = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": not special}
        if before := found.get(content):  # as in transformers, its id stays
            found[content] = {**before, **attributes, **token, "id": before.get("id")} if "id" in token else before
            continue
        id = pieces.get(content, following)
        require(
            token.get("id", id) == id,
            f"its settings give {content!r:.80} the id {token.get('id')}, but as an added token it has the id {id}",
        )
        following += id == following
        found[content] = {**attributes, **token, "id": id, "special": special}
    if found == {entry.get("content"): entry for entry in entries}:
        return stated
    return {**stated, "added_tokens": sorted(found.values(), key=lambda entry: entry.get("id", 0))}


def checked(stated: Any) -> Document:
    """Validate a parsed tokenizer.json. Raises DocumentError."""
    require(isinstance(stated, dict), "it is not a JSON object")
    notes: list[str] = []
    model = _model(stated.get("model"), notes)
    added = stated.get("added_tokens") or []
    require(
        isinstance(added, list) and len(added) <= MAX_ADDED, f"its added tokens are not a list of at most {MAX_ADDED:,}"
    )
    for token in added:
        require(isinstance(token, dict) and {"id", "content"} <= token.keys(), "it has an invalid added token")
    added = [check_fields("an added token", token, _ADDED) for token in added]
    forward = Chain("its normalizer and pre_tokenizer")  # one chain: every text passes both
    parts = {
        name: check_chain(chain, stated.get(name), known, inner)
        for name, chain, known, inner in (
            ("normalizer", forward, NORMALIZERS, "normalizers"),
            ("pre_tokenizer", forward, PRE_TOKENIZERS, "pretokenizers"),
            ("post_processor", Chain("its post_processor"), PROCESSORS, "processors"),
            ("decoder", Chain("its decoder"), DECODERS, "decoders"),
        )
    }
    if any(part != stated.get(name) for name, part in parts.items()) or added != (stated.get("added_tokens") or []):
        notes.append(_FIELDS)
    # Truncation and padding are not used.
    whole_text = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts, "model": model}
    try:
        written = json.dumps(whole_text, ensure_ascii=False, allow_nan=False)
        written.encode()
    except ValueError as error:  # an escaped lone surrogate, or NaN
        raise DocumentError(f"it holds a value that JSON cannot: {error}") from None
    return Document(written, tuple(dict.fromkeys(notes)))


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


_ADDED: Fields = {
    "id": whole(0, MAX_ID),
    "content": text(0, MAX_TOKEN),
    **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), boolean),
}


def _model(model: Any, notes: list[str]) -> dict[str, Any]:
    require(isinstance(model, dict), "it has no model")
    kind = model.get("type") or _kind(model)  # files from before 2021 lack it
    require(isinstance(kind, str) and kind in _MODELS, f"its model, {kind!r:.40}, is unknown")
    found = check_fields(kind, model, _MODELS[kind])
    if found != model:
        notes.append(_FIELDS)
    model = found
    if model.get("dropout") is not None:
        notes.append(_DROPOUT)
        model = {**model, "dropout": None}
    if model.get("max_input_chars_per_word", 0) > MAX_WORD:
        notes.append(_WORDS)
        model = {**model, "max_input_chars_per_word": MAX_WORD}
    return {**model, "type": kind}


def _kind(model: Mapping[str, Any]) -> str:
    if "merges" in model:
        return "BPE"
    if isinstance(model.get("vocab"), list):
        return "Unigram"
    return "WordPiece" if "max_input_chars_per_word" in model else "WordLevel"


def _vocabulary(value: Any) -> None:
    require(isinstance(value, dict) and len(value) <= MAX_VOCABULARY, f"must hold at most {MAX_VOCABULARY:,} tokens")
    require(all(type(id) is int for id in value.values()), "must have a whole number for every token")
    require(min(value.values(), default=0) >= 0, "has a token id below 0")
    require(max(value.values(), default=0) <= MAX_ID, f"has a token id beyond {MAX_ID:,}")
    require(max(map(len, value), default=0) <= MAX_TOKEN, f"has a token of more than {MAX_TOKEN:,} characters")


def _scored(value: Any) -> None:
    require(isinstance(value, list) and len(value) <= MAX_VOCABULARY, f"must hold at most {MAX_VOCABULARY:,} tokens")
    for entry in value:
        pair = isinstance(entry, list) and len(entry) == 2
        require(pair and isinstance(entry[0], str) and type(entry[1]) in (int, float), "must hold tokens and scores")
        require(len(entry[0]) <= MAX_TOKEN, f"has a token of more than {MAX_TOKEN:,} characters")
        require(math.isfinite(entry[1]), "must hold tokens and scores")


def _merges(value: Any) -> None:
    require(isinstance(value, list), "must be a list")
    for entry in value:
        pair = entry if isinstance(entry, list) else [entry, ""]
        require(len(pair) == 2 and type(pair[0]) is str and type(pair[1]) is str, "must hold pairs of tokens")
        require(len(pair[0]) + len(pair[1]) <= 2 * MAX_TOKEN, f"has a token of more than {MAX_TOKEN:,} characters")


def _id_or_null(value: Any) -> None:
    if value is not None:
        whole(0, MAX_VOCABULARY)(value)


def _ignored(value: Any) -> None:
    require(value is None or type(value) in (int, float), "must be a number or null")


def _no_prefix(value: Any) -> None:
    # Only WordPiece uses it. With BPE, a merge without the prefix crashes the library.
    require(value in (None, ""), "is not supported")


_MODELS: dict[str, Fields] = {
    "BPE": {
        "dropout": _ignored, "unk_token": text_or_null, "continuing_subword_prefix": _no_prefix,
        "end_of_word_suffix": text_or_null, "fuse_unk": boolean, "byte_fallback": boolean, "ignore_merges": boolean,
        "vocab": _vocabulary, "merges": _merges,
    },
    "WordPiece": {
        "unk_token": text(), "continuing_subword_prefix": text(), "max_input_chars_per_word": whole(1, 1 << 63),
        "vocab": _vocabulary,
    },
    "WordLevel": {"unk_token": text(), "vocab": _vocabulary},
    "Unigram": {
        "unk_id": _id_or_null, "vocab": _scored,
        "byte_fallback": boolean,
    },
}  # fmt: skip
