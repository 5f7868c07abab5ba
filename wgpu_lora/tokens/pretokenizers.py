"""Map the pre-tokenization of a tokenizer.json to llama.cpp's name for it; unknown ones are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.tokens.backend import BackendError
from wgpu_lora.tokens.components import DocumentError
from wgpu_lora.tokens.document import checked
from wgpu_lora.tokens.process import Child

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LETTERS = r"[\p{L}\p{M}]"
# Regular expression of a byte-level tokenizer's Split -> its name in llama.cpp.
NAMES = {
    rf"{_CONTRACTIONS}|{_WORD}\p{{L}}+|\p{{N}}|{_REST}": "qwen2",
    rf"{_CONTRACTIONS}|{_WORD}{_LETTERS}+|\p{{N}}|{_REST.replace('L}', 'L}' + chr(92) + 'p{M}', 1)}": "qwen35",
    rf"{_CONTRACTIONS}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}": "llama-bpe",
    rf"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*|\p{{N}}|{_REST.replace('n]*', 'n/]*', 1)}": "tekken",
}
# Pre-tokenizers for which llama.cpp takes a piece that is a token without merging.
WHOLE_PIECES = ("llama-bpe", "tekken")
MARKS = "llama.cpp splits combining marks (in Hindi or Thai, for example) from their letters: such texts get other ids."


@dataclass(frozen=True)
class Splitting:
    """`model` and `pre` of tokenizer.ggml.*; `space_prefix`: SentencePiece adds a space before a text."""

    model: str
    pre: str
    space_prefix: bool = False
    notes: tuple[str, ...] = ()


def splitting_of(stated: Mapping[str, Any], where: str) -> Splitting:
    """The splitting of a parsed tokenizer.json, called `where`; UserError if llama.cpp has no such tokenizer."""
    model = stated.get("model") or {}
    if model.get("type") != "BPE":
        kind = model.get("type")
        raise UserError(f"{where} is of type {kind!r}, but only BPE can be exported: use merge instead.")
    pieces = _steps(stated.get("pre_tokenizer"), "pretokenizers")
    changes = _steps(stated.get("normalizer"), "normalizers")
    found = None
    if pieces and pieces[-1].get("type") == "ByteLevel":
        found = _byte_level(model, pieces, changes)
    elif model.get("byte_fallback"):
        found = _sentence_piece(pieces, changes)
    if found is None:
        raise UserError(
            f"{where} has a pre_tokenizer and normalizer that llama.cpp does not support: a GGUF file would tokenise "
            "text wrongly, so use merge instead."
        )
    return found


def merges_of(model: Mapping[str, Any]) -> list[list[str]]:
    """The merges of a tokenizer.json's model, in either format, as pairs."""
    return [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]


def _steps(value: Any, name: str) -> list[dict[str, Any]]:
    if not value:
        return []
    return list(value[name]) if value.get("type") == "Sequence" else [value]


def _byte_level(
    model: Mapping[str, Any], pieces: list[dict[str, Any]], changes: list[dict[str, Any]]
) -> Splitting | None:
    *before, last = pieces
    # llama.cpp does not normalise; NFC, which Qwen's tokenizers use, does not change most text.
    if last.get("add_prefix_space") or any(change.get("type") != "NFC" for change in changes):
        return None
    kinds = [step.get("type") for step in before]
    if last.get("use_regex", True):
        if not kinds:
            return _checked("gpt-2", model)
        return _checked("smollm", model) if kinds == ["Digits"] and before[0].get("individual_digits") else None
    if kinds != ["Split"] or before[0].get("invert") or before[0].get("behavior") != "Isolated":
        return None
    name = NAMES.get((before[0].get("pattern") or {}).get("Regex", ""))
    return _checked(name, model) if name else None


def _checked(name: str, model: Mapping[str, Any]) -> Splitting:
    """The splitting, with notes on differences of llama.cpp, which may imply another `ignore_merges`."""
    notes = [MARKS] if name == "tekken" else []
    if bool(model.get("ignore_merges")) == (name in WHOLE_PIECES):
        return Splitting("gpt2", name, notes=tuple(notes))
    apart = _made_by_no_merges(model)
    if apart is not None:
        notes.append(
            f"no merges produce the token {apart!r}: llama.cpp may tokenise texts that contain it differently."
        )
    return Splitting("gpt2", name, notes=tuple(notes))


def _made_by_no_merges(model: Mapping[str, Any]) -> str | None:
    """The first token that merging alone does not produce, if any."""
    texts = list(model["vocab"])
    try:
        merging = Child(checked({"model": {**model, "ignore_merges": False}}).text)
        return next((text for text, ids in zip(texts, merging.encode(texts), strict=True) if len(ids) != 1), None)
    except (DocumentError, BackendError) as error:
        raise UserError(f"The tokenizer cannot be read ({error}): use the model's own files.") from error


def _sentence_piece(pieces: list[dict[str, Any]], changes: list[dict[str, Any]]) -> Splitting | None:
    kinds = [change.get("type") for change in changes]
    if not pieces and kinds in (["Prepend", "Replace"], ["Replace"]):
        marked = changes[-1].get("content") == "▁" and (changes[-1].get("pattern") or {}).get("String") == " "
        prepends = len(kinds) == 2
        if not marked or (prepends and changes[0].get("prepend") != "▁"):
            return None
        return Splitting("llama", "default", space_prefix=prepends)
    if kinds or len(pieces) != 1 or pieces[0].get("type") != "Metaspace":
        return None
    if pieces[0].get("replacement") != "▁" or pieces[0].get("split", True):
        return None
    scheme = pieces[0].get("prepend_scheme", "always")
    where = {"always": "", "first": " or follows a special token"}.get(scheme)
    note = f"llama.cpp adds a space before a text that begins with one{where}; this tokenizer does not."
    return Splitting("llama", "default", scheme != "never", () if where is None else (note,))
