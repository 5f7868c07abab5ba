"""A tokenizer.json before the library reads it: strict JSON, with further added tokens, without dropout and padding."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from wgpu_lora.files.json_files import object_with_unique_keys

_DROPOUT = "the tokenizer's dropout of merges is ignored: splitting is deterministic."


class TokenizerError(Exception):
    """A tokenizer.json is not accepted, or the library failed; the text says why."""


def normalize_document(document: str, added_tokens: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[str]]:
    """A tokenizer.json written out again, so that the library cannot read it in another way, and notes for the user.

    Args:
        added_tokens: further added tokens, with `content` and optionally `id` and attributes.

    Raises:
        TokenizerError: it is not strict JSON, or the added tokens contradict it.
    """
    try:
        content = json.loads(document, object_pairs_hook=object_with_unique_keys, parse_constant=_no_constant)
    except RecursionError:
        raise TokenizerError("it is nested too deeply") from None
    except ValueError as error:
        raise TokenizerError(f"it is not JSON: {error}") from None
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict):
        raise TokenizerError("it has no model")
    notes = [] if model.get("dropout") is None else [_DROPOUT]
    content |= {"truncation": None, "padding": None, "model": {**model, "dropout": None} if notes else model}
    if added_tokens:
        content["added_tokens"] = _with_added(content.get("added_tokens") or [], model.get("vocab") or {}, added_tokens)
    try:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError as error:  # an escaped lone surrogate, or a number beyond those of JSON
        raise TokenizerError(f"it holds a value that JSON cannot: {error}") from None
    return text, notes


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _with_added(entries: Any, vocabulary: Any, added_tokens: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The document's added tokens with further ones, numbered as the tokenizers library does."""
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise TokenizerError("its added tokens are not a list of objects")
    pieces = vocabulary if isinstance(vocabulary, dict) else {entry[0]: i for i, entry in enumerate(vocabulary)}
    result = {entry.get("content"): entry for entry in entries}
    following = max([len(vocabulary) - 1, *(id for entry in entries if type(id := entry.get("id")) is int)]) + 1
    for token in added_tokens:
        content, special = token["content"], bool(token.get("special"))
        attributes = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": not special}
        if before := result.get(content):  # as in transformers, its id stays
            result[content] = {**before, **attributes, **token, "id": before.get("id")} if "id" in token else before
            continue
        id = pieces.get(content, following)
        if token.get("id", id) != id:
            raise TokenizerError(
                f"its settings give {content!r:.80} the id {token.get('id')}, but as an added token it has the id {id}"
            )
        following += id == following
        result[content] = {**attributes, **token, "id": id, "special": special}
    if result == {entry.get("content"): entry for entry in entries}:
        return entries
    return sorted(result.values(), key=lambda entry: entry.get("id", 0))
