"""The tokenizers of GGUF files: llama.cpp's names of pre-tokenizations, and the conversion to a tokenizer.json."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.formats.gguf.gguf_header import Header, special_ids
from wgpu_lora.formats.tokenizer.tokenizer import Tokenizer
from wgpu_lora.formats.tokenizer.tokenizer_json import TokenizerError
from wgpu_lora.formats.tokenizer.tokenizer_process import TokenizerProcess
from wgpu_lora.processes.child_process import ChildEnded

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


def splitting_of(document: Mapping[str, Any], where: str) -> Splitting:
    """The splitting of a parsed tokenizer.json, called `where`; UserError if llama.cpp has no such tokenizer."""
    model = document.get("model") or {}
    if model.get("type") != "BPE":
        kind = model.get("type")
        raise UserError(f"{where} is of type {kind!r}, but only BPE can be exported: use merge instead.")
    pieces = _steps(document.get("pre_tokenizer"), "pretokenizers")
    changes = _steps(document.get("normalizer"), "normalizers")
    result = None
    if pieces and pieces[-1].get("type") == "ByteLevel":
        result = _byte_level_splitting(model, pieces, changes)
    elif model.get("byte_fallback"):
        result = _sentencepiece_splitting(pieces, changes)
    if result is None:
        raise UserError(
            f"{where} has a pre_tokenizer and normalizer that llama.cpp does not support: a GGUF file would tokenise "
            "text wrongly, so use merge instead."
        )
    return result


def merges_of(model: Mapping[str, Any]) -> list[list[str]]:
    """The merges of a tokenizer.json's model, in either format, as pairs."""
    return [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]


def _steps(value: Any, name: str) -> list[dict[str, Any]]:
    if not value:
        return []
    return list(value[name]) if value.get("type") == "Sequence" else [value]


def _byte_level_splitting(
    model: Mapping[str, Any], pieces: list[dict[str, Any]], changes: list[dict[str, Any]]
) -> Splitting | None:
    *before, last = pieces
    # llama.cpp does not normalise; NFC, which Qwen's tokenizers use, does not change most text.
    if last.get("add_prefix_space") or any(change.get("type") != "NFC" for change in changes):
        return None
    kinds = [step.get("type") for step in before]
    if last.get("use_regex", True):
        if not kinds:
            return _as_llama_cpp("gpt-2", model)
        return _as_llama_cpp("smollm", model) if kinds == ["Digits"] and before[0].get("individual_digits") else None
    if kinds != ["Split"] or before[0].get("invert") or before[0].get("behavior") != "Isolated":
        return None
    name = NAMES.get((before[0].get("pattern") or {}).get("Regex", ""))
    return _as_llama_cpp(name, model) if name else None


def _as_llama_cpp(name: str, model: Mapping[str, Any]) -> Splitting:
    """The splitting, with notes on differences of llama.cpp, which may imply another `ignore_merges`."""
    notes = [MARKS] if name == "tekken" else []
    if bool(model.get("ignore_merges")) == (name in WHOLE_PIECES):
        return Splitting("gpt2", name, notes=tuple(notes))
    unreachable = _unreachable_token(model)
    if unreachable is not None:
        notes.append(
            f"no merges produce the token {unreachable!r}: llama.cpp may tokenise texts that contain it differently."
        )
    return Splitting("gpt2", name, notes=tuple(notes))


def _unreachable_token(model: Mapping[str, Any]) -> str | None:
    """The first token that merging alone does not produce, if any."""
    texts = list(model["vocab"])
    try:
        merging = TokenizerProcess(json.dumps({"model": {**model, "ignore_merges": False}}))
        result = merging.call("encode", texts)
        return next((text for text, ids in zip(texts, result, strict=True) if len(ids) != 1), None)
    except (TokenizerError, ChildEnded) as error:
        raise UserError(f"The tokenizer cannot be read ({error}): use the model's own files.") from error


def _sentencepiece_splitting(pieces: list[dict[str, Any]], changes: list[dict[str, Any]]) -> Splitting | None:
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


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
# Tokens that always end a generation in llama.cpp, whatever the metadata say.
_ENDS = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>"}
_ENDS |= {"</s>", "<｜end▁of▁sentence｜>"}
# Limits for rebuilding merges, which looks at every split of every token.
_MAX_SPLITS, _MAX_TOKEN = 1 << 21, 1024
# The largest vocabulary of a supported architecture has 262,208 tokens, and Llama 3 has two merges per token.
_MAX_TOKENS, _MERGES_A_TOKEN = 320_000, 3
_SPACE = "▁"
_TEMPLATE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_REGEXES = {name: regex for regex, name in NAMES.items()}
# tokenizer.ggml.pre -> the canonical name of the pre-tokenizer (tokenizer/gguf_tokenizer.py).
_PRES = {name: name for name in ("gpt-2", "smollm", *_REGEXES)}
_PRES |= {"default": "gpt-2", "llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
_ADD_BOS = ("llama-bpe", "tekken")
_NFC = ("qwen2", "qwen35")  # Qwen's tokenizers use NFC, which llama.cpp does not


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens by id, their types, and ids by token; `ids` lacks unused and empty tokens."""

    header: Header
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]

    def special(self, name: str) -> str | None:
        """The token of tokenizer.ggml.<name>_token_id; None if there is none."""
        id = self.header.values.get(f"tokenizer.ggml.{name}_token_id")
        if type(id) is not int or not 0 <= id < len(self.tokens) or self.tokens[id] not in self.ids:
            return None
        return self.tokens[id]

    def of_type(self, *types: int) -> list[str]:
        return [token for token, id in self.ids.items() if self.types[id] in types]

    def flag(self, name: str, default: bool) -> bool:
        value = self.header.values.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise UserError(f"tokenizer.ggml.{name} in {self.header.path} is {value!r:.100}, expected true or false.")
        return value


def read_tokenizer(header: Header, vocab_size: int, pre: str | None = None) -> Tokenizer | None:
    """The tokenizer of a GGUF file; None if it has none.

    Args:
        pre: default for tokenizer.ggml.pre, which old files lack.

    Raises:
        UserError: the tokenizer is of an unsupported kind, does not fit the model's `vocab_size`, or is damaged.
    """
    kind = header.values.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama"):
        raise UserError(
            f"The tokenizer {kind!r:.100} of {header.path} is not supported: use a model with gpt2 or llama."
        )
    vocabulary = _vocabulary(header, vocab_size)
    try:
        document, add_bos = _byte_level(vocabulary, pre) if kind == "gpt2" else _sentencepiece(vocabulary)
        document["added_tokens"] = _added_tokens(vocabulary)
        document["post_processor"] = _post_processor(vocabulary, add_bos)
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
        special = {f"{name}_token": text for name, key in names.items() if (text := vocabulary.special(key))}
        ends = [vocabulary.ids[text] for text in vocabulary.of_type(_CONTROL, _USER_DEFINED) if text in _ENDS]
        return Tokenizer(
            TokenizerProcess(json.dumps(document), normalized=True),
            special_tokens=special,
            chat_templates=_chat_templates(header),
            template_origin=f" in {header.path}",
            eos_ids=list(dict.fromkeys([*special_ids(header, len(vocabulary.tokens)), *ends])),
        )
    except TokenizerError as error:
        raise UserError(
            f"The tokenizer in {header.path} cannot be built ({error!s:.200}): use another conversion of the model."
        ) from None


def _vocabulary(header: Header, vocab_size: int) -> _Vocabulary:
    path = header.path
    tokens = list(header.strings("tokenizer.ggml.tokens", min(vocab_size, _MAX_TOKENS)) or ())
    if not tokens:
        raise UserError(f"{path} has a tokenizer without tokens: use another conversion of the model.")
    numbers = header.numbers("tokenizer.ggml.token_type", len(tokens))
    types = [_NORMAL] * len(tokens) if numbers is None else numbers.tolist()
    if (
        header.values.get("tokenizer.ggml.model") == "llama"
        and header.values.get("tokenizer.ggml.add_space_prefix") is False
    ):
        # GGUF has Gemma's runs of ▁ as spaces. Texts with either are normalized to ▁ before they are looked for.
        runs = {id: _SPACE * len(token) for id, token in enumerate(tokens) if token.isspace() and set(token) == {" "}}
        known_tokens = set(tokens)
        for id, run in runs.items():
            tokens[id] = run if types[id] == _USER_DEFINED and run not in known_tokens else tokens[id]
    ids: dict[str, int] = {}
    for id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == _UNUSED or not token:
            continue
        if token in ids:
            raise UserError(f"{path} holds the token {token!r:.100} twice: use another conversion of the model.")
        ids[token] = id
    return _Vocabulary(header, tokens, types, ids)


Document = dict[str, Any]  # a tokenizer.json


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> Document:
    return {"type": "BPE", "vocab": vocabulary.ids, "merges": merges, **options}


def _replace(text: str, content: str) -> Document:
    return {"type": "Replace", "pattern": {"String": text}, "content": content}


def _bytes_only(use_regex: bool) -> Document:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _byte_level(vocabulary: _Vocabulary, pre: str | None) -> tuple[Document, bool]:
    """Byte-level BPE, and whether it adds bos by default."""
    header = vocabulary.header
    name = header.values.get("tokenizer.ggml.pre", pre)
    if not isinstance(name, str) or name not in _PRES:
        raise UserError(
            f"tokenizer.ggml.pre {name!r:.100} of {header.path} is not supported: convert the model again, to one of "
            f"{', '.join(_PRES)}."
        )
    pre = _PRES[name]
    steps: list[Document] = [{"type": "Digits", "individual_digits": True}] if pre == "smollm" else []
    if pre in _REGEXES:
        split = {"type": "Split", "pattern": {"Regex": _REGEXES[pre]}, "behavior": "Isolated", "invert": False}
        steps.append(split)
    steps.append(_bytes_only(use_regex=pre not in _REGEXES))
    return {
        "model": _bpe(vocabulary, _file_merges(vocabulary) or [], ignore_merges=pre in WHOLE_PIECES),
        "normalizer": {"type": "NFC"} if name in _NFC else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {**_bytes_only(use_regex=True), "add_prefix_space": True},
    }, pre in _ADD_BOS


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[Document, bool]:
    """SentencePiece's BPE: spaces as ▁, no splitting, unknown characters as bytes."""
    unknown = vocabulary.special("unknown") or next(iter(vocabulary.of_type(_UNKNOWN)), None)
    merges = _file_merges(vocabulary)
    merges = _rebuilt_merges(vocabulary) if merges is None else merges
    # As in llama.cpp: a space before the text, and after every added token.
    normalizing = [_replace(" ", _SPACE)]
    decoding: list[Document] = [_replace(_SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if vocabulary.flag("add_space_prefix", True):
        normalizing.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoding.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "model": _bpe(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
        "normalizer": {"type": "Sequence", "normalizers": normalizing},
        "decoder": {"type": "Sequence", "decoders": decoding},
    }, True


def _file_merges(vocabulary: _Vocabulary) -> list[tuple[str, str]] | None:
    path, ids, tokens = vocabulary.header.path, vocabulary.ids, vocabulary.tokens
    merges = vocabulary.header.strings("tokenizer.ggml.merges", _MERGES_A_TOKEN * len(tokens))
    if merges is None:
        return None
    pairs = array("I")  # ids, since texts would take many times the size of the file
    for text in merges:
        left, space, right = text.partition(" ") if text[:1] != " " else ("", "", "")
        if not space or left not in ids or right not in ids or left + right not in ids:
            raise UserError(
                f"{path} has the merge {text!r:.100} of unknown tokens: use another conversion of the model."
            )
        pairs.append(ids[left])
        pairs.append(ids[right])
    in_order = iter(pairs)
    return [(tokens[left], tokens[right]) for left, right in zip(in_order, in_order, strict=True)]


def _rebuilt_merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """The merges implied by tokens and scores, best first, and longest left part first for the same token.

    Some converters give all tokens the same score. Then they are ordered by id, since SentencePiece numbers by rank.
    """
    header, ids = vocabulary.header, vocabulary.ids
    scores = header.numbers("tokenizer.ggml.scores", len(vocabulary.tokens))
    if scores is None or not np.isfinite(scores).all():
        raise UserError(f"{header.path} has no score for each of its tokens: use another conversion of the model.")
    pieces = {token: id for token, id in ids.items() if vocabulary.types[id] == _NORMAL}
    if sum(len(piece) for piece in pieces) > _MAX_SPLITS or max(map(len, pieces), default=0) > _MAX_TOKEN:
        raise UserError(f"{header.path} has tokens that are too long: use another conversion of the model.")
    has_equal_scores = len({float(scores[id]) for id in pieces.values()}) == 1
    ranks = range(len(scores)) if has_equal_scores else (-scores).tolist()
    result = [
        (ranks[id], -cut, left, right)
        for piece, id in pieces.items()
        for cut in range(1, len(piece))
        if (left := piece[:cut]) in pieces and (right := piece[cut:]) in pieces
    ]
    result.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in result]


def _added_tokens(vocabulary: _Vocabulary) -> list[Document]:
    """Control tokens, which are special, and user-defined tokens; both are matched before splitting."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    return [
        {
            **{"id": vocabulary.ids[text], "content": text, **plain, "special": special},
            "normalized": set(text) == {_SPACE} and len(text) > 1,
        }
        for kinds, special in (((_CONTROL, _UNKNOWN), True), ((_USER_DEFINED,), False))
        for text in vocabulary.of_type(*kinds)
    ]


def _post_processor(vocabulary: _Vocabulary, add_bos: bool) -> Document | None:
    bos = vocabulary.special("bos") if vocabulary.flag("add_bos_token", add_bos) else None
    eos = vocabulary.special("eos") if vocabulary.flag("add_eos_token", False) else None
    if not bos and not eos:
        return None

    def piece(kind: str, name: str, number: int = 0) -> Document:
        return {kind: {"id": name, "type_id": number}}

    before, after = ([piece("SpecialToken", text)] if text else [] for text in (bos, eos))
    single = [*before, piece("Sequence", "A"), *after]
    special = {text: {"id": text, "ids": [vocabulary.ids[text]], "tokens": [text]} for text in (bos, eos) if text}
    pair = [*single, piece("Sequence", "B", 1)]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _chat_templates(header: Header) -> dict[str, str]:
    """Chat templates by name; names must be plain, since they become file names."""
    prefix = "tokenizer.chat_template"
    templates = {"default": header.values.get(prefix)}
    for key, value in header.values.items():
        if key.startswith(f"{prefix}."):
            name = key.removeprefix(f"{prefix}.")
            if not _TEMPLATE_NAME.fullmatch(name):
                raise UserError(
                    f"{header.path} names a chat template {name!r:.100}: use another conversion of the model."
                )
            templates[name] = value
    return {name: source for name, source in templates.items() if isinstance(source, str)}
