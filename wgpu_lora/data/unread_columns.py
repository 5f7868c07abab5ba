"""Columns of rows, and keys of messages, that nothing reads: which of them end a run, and which are named or harmless.

A name is judged by its words, since other programs have many spellings of each (`loss_mask`, `lossMask`, `train_mask`).
"""

from __future__ import annotations

import re
from typing import Any

from wgpu_lora.data.json_values import kind_of

_WORD = re.compile(r"[a-z]+|[A-Z]+(?![a-z])|[A-Z][a-z]*")
_TRAINED = {"mask", "masks", "masked", "weight", "weights", "train", "trainable", "trained", "training"}
_MEDIA = {"image", "images", "video", "videos", "audio", "audios", "pixel", "picture", "pictures"}
_FLAGS = ("train", "training", "trainable", "trained", "train_on_turn", "masked")
_SPELLINGS = {"0": ("0", "0.0", "false"), "1": ("1", "1.0", "true")}  # also as cells of CSV files
_LENGTHS = {"prompt_length", "prompt_len", "position_ids", "seq_lengths"}
# Bookkeeping of rows: names that are it themselves, words at the end of a name, and words at its beginning.
HARMLESS = {
    "idx", "index", "uid", "uuid", "hash", "url", "urls", "source", "sources", "dataset", "subset", "split", "model",
    "generator", "lang", "language", "category", "categories", "topic", "domain", "tag", "tags", "task", "type",
    "license", "meta", "metadata", "timestamp", "date", "time", "author", "version", "quality", "difficulty", "length",
    "special_tokens_mask", "token_type_ids", "parallel_tool_calls", "name", "check", "steps", "",
}  # fmt: skip
HARMLESS_ENDS = {
    "id", "idx", "index", "uuid", "hash", "url", "model", "score", "scores", "count", "rating", "source", "split",
}  # fmt: skip
HARMLESS_STARTS = {"id", "score", "scores", "num", "rating", "meta", "metadata", "created", "unnamed"}


def is_empty(value: Any) -> bool:
    """Whether a column has no value: null, or an empty text, list or object."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def is_harmless(name: str, value: Any = None) -> bool:
    """Whether a column only keeps account of rows, so that nobody expects it to be trained on, or changes nothing."""
    words = _words(name)
    if name.strip().lower() in HARMLESS or name.startswith("__") or (words and words[-1] in HARMLESS_ENDS):
        return True
    if name in _LENGTHS or {*words} & _TRAINED:
        return _is_neutral(name, words, value)
    return bool(words) and words[0] in HARMLESS_STARTS


def refusal(name: str, value: Any) -> str | None:
    """Why a row with this column, which nothing reads, cannot be trained on as it is; None if it can.

    A value that changes nothing, such as a weight of 1 or a mask of ones, is no reason.
    """
    words = {*_words(name)}
    if words & _MEDIA:
        return f"'{name:.80}' is not supported, since only text is trained on; remove it to train on the text alone"
    if "history" in words:
        return f"'{name:.80}' has earlier turns, which this format does not read; write all turns into 'messages'"
    if is_of_training(name) and not is_harmless(name, value):
        return (
            f"'{name:.80}' is {kind_of(value)}, which may say what is trained on, but it is not read here; use "
            "'weight' of messages or 'labels' of 'input_ids', or remove it"
        )
    return None


def is_of_training(name: str) -> bool:
    """Whether a column may say what is trained on."""
    return bool({*_words(name)} & _TRAINED) or name in _LENGTHS


def is_input(name: str) -> bool:
    """Whether a column has a part of what a model is asked: images, videos, audio, earlier turns."""
    return bool({*_words(name)} & {*_MEDIA, "history"})


def _is_neutral(name: str, words: list[str], value: Any) -> bool:
    """Whether a mask has no zeros, a weight is 1, a turn is trained on: what is so without the column, too."""
    values = value if isinstance(value, list) else [value]
    if name == "position_ids":
        return values == [*range(len(values))]
    if name == "seq_lengths":
        return len(values) == 1
    if words[-1:] in (["mask"], ["masks"]) and not isinstance(value, list):
        return False  # whether 1 hides or shows is not known
    expected = "0" if "masked" in words else "1"
    states = words[-1:] in (["mask"], ["masks"], ["weight"], ["weights"]) or name in _FLAGS
    return states and all(str(item).strip().lower() in _SPELLINGS[expected] for item in values)


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(name)]
