"""Mutations of a tokenizer.json that put other components in its pipeline: for `scripts/fuzz.py`."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

from support.fuzz.mutators import of_json

PATTERNS: list[Any] = [
    {"String": "a"}, {"String": ""}, {"String": " "}, {}, None,
    *({"Regex": regex} for regex in (
        "", "a", " {2,}", "(?=.)", r"(\w+\s?)+$", r"\s+(?!\S)|\s+", r"[^\s\p{L}]?\p{L}+|\p{N}{1,3}", "(a|b)(a|b)*",
        "[a&&[^b]]+", r"(?<!\n)^", "a{1,3}+", "[]a]", r"\s*[\r\n]+|\s+$", r"(?i:'s|'t)|(\d{3})+(?!\d)", "a*a*a*b",
    )),
]  # fmt: skip
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "a", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {"a": {"id": "a", "ids": [1], "tokens": ["a"]}},
}
REPLACES: list[Any] = [
    {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"},
    {"type": "Replace", "pattern": {"Regex": "a"}, "content": "\u2581a"},
]
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": True}
# Where components stand -> what their list is called, and some of them.
PARTS: dict[str, tuple[str, list[Any]]] = {
    "normalizer": ("normalizers", [
        *({"type": name} for name in (
            "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "ByteLevel",
        )),
        *REPLACES, {"type": "Strip", "strip_left": True, "strip_right": True}, {"type": "Prepend", "prepend": "aa"},
        {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
         "lowercase": True},
        {"type": "Precompiled", "precompiled_charsmap": "CAAAAAAAAAAAAAAAYQA="},
    ]),
    "pre_tokenizer": ("pretokenizers", [
        *({"type": name} for name in ("Whitespace", "WhitespaceSplit", "UnicodeScripts", "BertPreTokenizer")),
        BYTES, METASPACE, {"type": "Digits", "individual_digits": True},
        {"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Isolated", "invert": False},
        {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": True},
        {"type": "Punctuation", "behavior": "Contiguous"}, {"type": "CharDelimiterSplit", "delimiter": "a"},
        {"type": "FixedLength", "length": 2},
    ]),
    "post_processor": ("processors", [
        BYTES, TEMPLATE, {"type": "BertProcessing", "sep": ["a", 1], "cls": ["b", 2]},
        {"type": "RobertaProcessing", "sep": ["a", 1], "cls": ["b", 2], "trim_offsets": True, "add_prefix_space": True},
    ]),
    "decoder": ("decoders", [
        *REPLACES, BYTES, METASPACE, {"type": "Fuse"}, {"type": "ByteFallback"},
        {"type": "BPEDecoder", "suffix": "</w>"}, {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
    ]),
}  # fmt: skip
MODELS: list[Any] = [
    {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "", "max_input_chars_per_word": 100,
     "vocab": {"a": 0, "b": 1}},
    {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0}},
    {"type": "Unigram", "unk_id": 0, "vocab": [["a", -1.0], ["aa", -2.5]], "byte_fallback": False},
    {"type": "BPE", "dropout": 0.5, "unk_token": "a", "fuse_unk": True, "byte_fallback": True, "ignore_merges": True,
     "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
]  # fmt: skip


def of_tokenizer(text: bytes, rng: random.Random) -> bytes:
    """A tokenizer.json whose components are others, and some of their values too."""
    try:
        value = json.loads(text)
        for name in rng.sample(list(PARTS), rng.randint(1, 3)):
            inner, variants = PARTS[name if rng.random() < 0.95 else rng.choice(list(PARTS))]
            parts = copy.deepcopy(rng.choices(variants, k=rng.choice([1, 1, 2, 3, 8, 30])))
            for part in parts:
                if "pattern" in part and rng.random() < 0.5:
                    part["pattern"] = copy.deepcopy(rng.choice(PATTERNS))
            value[name] = parts[0] if len(parts) == 1 else {"type": "Sequence", inner: parts}
        if rng.random() < 0.3:
            value["model"] = copy.deepcopy(rng.choice(MODELS))
    except (ValueError, RecursionError, TypeError):
        return of_json(text, rng)
    document = json.dumps(value).encode()
    return of_json(document, rng) if rng.random() < 0.4 else document
