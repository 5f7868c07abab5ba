"""A tokenizer.json's kind is recognised or refused, and its tokens get the kinds and scores that llama.cpp reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.gguf_models import DEMO, read, small

from wgpu_lora.errors import UserError
from wgpu_lora.export.gguf_export import export_model
from wgpu_lora.export.gguf_vocabulary import Vocabulary, read_vocabulary
from wgpu_lora.models.architectures import load_config
from wgpu_lora.tokenizer.gguf_tokenizer import splitting_of
from wgpu_lora.tokenizer.tokenizer import Tokenizer

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
# As they stand in the tokenizer.json of Qwen2.5, Qwen3.5, Llama 3 and Mistral Nemo.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PREPEND = [
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
]


def vocabulary(model: Path) -> Vocabulary:
    return read_vocabulary(Tokenizer.load(model), load_config(model), model)


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def stated(*pieces: dict[str, Any], normalizers: list | None = None, **model: Any) -> dict[str, Any]:
    whole = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]], **model}
    return {
        "model": whole,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pieces)} if pieces else None,
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
    }


def metaspace(scheme: str) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}


DIGITS = {"type": "Digits", "individual_digits": True}
GPT2 = {**BYTES, "use_regex": True}
KNOWN: dict[str, tuple[dict[str, Any], tuple[str, str, bool, int]]] = {
    "qwen2": (stated(split(QWEN2), BYTES, normalizers=[{"type": "NFC"}]), ("gpt2", "qwen2", False, 0)),
    "qwen35": (stated(split(QWEN35), BYTES, normalizers=[{"type": "NFC"}]), ("gpt2", "qwen35", False, 0)),
    "llama3": (stated(split(LLAMA3), BYTES, ignore_merges=True), ("gpt2", "llama-bpe", False, 0)),
    "llama3 merging": (stated(split(LLAMA3), BYTES), ("gpt2", "llama-bpe", False, 0)),
    "llama3 unreachable": (
        stated(split(LLAMA3), BYTES, vocab={"a": 0, "b": 1, "ab": 2, "ba": 3}),
        ("gpt2", "llama-bpe", False, 1),
    ),
    "tekken": (stated(split(TEKKEN), BYTES, ignore_merges=True), ("gpt2", "tekken", False, 1)),
    "smollm": (stated(DIGITS, GPT2), ("gpt2", "smollm", False, 0)),
    "gpt2": (stated(GPT2), ("gpt2", "gpt-2", False, 0)),
    "prepend": (stated(normalizers=PREPEND, byte_fallback=True), ("llama", "default", True, 0)),
    "replace": (stated(normalizers=PREPEND[1:], byte_fallback=True), ("llama", "default", False, 0)),
    "always": (stated(metaspace("always"), byte_fallback=True), ("llama", "default", True, 1)),
    "first": (stated(metaspace("first"), byte_fallback=True), ("llama", "default", True, 1)),
    "never": (stated(metaspace("never"), byte_fallback=True), ("llama", "default", False, 0)),
}


@pytest.mark.parametrize("case", KNOWN)
def test_known_kinds(case: str) -> None:
    content, (model, pre, space, notes) = KNOWN[case]
    found = splitting_of(content, "It")
    assert (found.model, found.pre, found.space_prefix, len(found.notes)) == (model, pre, space, notes)


UNKNOWN = {
    "another regex": stated(split(QWEN2.replace(r"\p{N}|", r"\p{N}{1,2}|")), BYTES),
    "behaviour": stated({**split(QWEN2), "behavior": "Removed"}, BYTES),
    "two splits": stated(split(QWEN2), split(LLAMA3), BYTES),
    "prefix space": stated({**GPT2, "add_prefix_space": True}),
    "lower case": stated(split(QWEN2), BYTES, normalizers=[{"type": "Lowercase"}]),
    "split marks": stated({**metaspace("always"), "split": True}, byte_fallback=True),
    "no fallback": stated(normalizers=PREPEND),
    "nothing": stated(),
    "unigram": stated(metaspace("always"), type="Unigram"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_unknown_kinds_are_refused(case: str) -> None:
    with pytest.raises(UserError, match=r"merge|only BPE"):
        splitting_of(UNKNOWN[case], "It")


def sentence_piece(directory: Path) -> Path:
    """A model whose tokenizer is as transformers converts one of SentencePiece."""
    model = small(directory, "llama", vocab_size=280)
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    content = {
        "version": "1.0",
        "added_tokens": [token(0, "<unk>"), token(1, "<s>"), token(2, "</s>"), token(265, "▁mine", special=False)],
        "normalizer": {"type": "Sequence", "normalizers": PREPEND},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": None,
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {text: id for id, text in enumerate(texts)},
            "merges": ["▁ a", "a b", "▁a b", "▁ ab"],
        },
    }
    (model / "tokenizer.json").write_text(json.dumps(content))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    for name in ("chat_template.jinja", "generation_config.json"):
        (model / name).unlink()
    return model


def token(id: int, text: str, special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": text, "special": special, **flags}


def test_sentence_pieces(tmp_path: Path) -> None:
    model = sentence_piece(tmp_path / "model")
    export_model(model, tmp_path / "model.gguf")
    facts, _ = read(tmp_path / "model.gguf")
    said = {key.removeprefix("tokenizer.ggml."): value for key, value in facts.items() if "tokenizer" in key}
    assert (said["model"], said["pre"], said["add_space_prefix"], said["add_bos_token"]) == ("llama", "default", 1, 1)
    assert (said["bos_token_id"], said["eos_token_id"], said["unknown_token_id"]) == (1, 2, 0)
    assert "merges" not in said
    assert len(said["tokens"]) == 280
    # unknown, control, bytes, normal, mine, padding
    assert said["token_type"] == [2, 3, 3, *[6] * 256, *[1] * 6, 4, *[5] * 14]
    assert said["tokens"][265:267] == [" mine", "[PAD266]"]
    order = dict(zip(said["tokens"], said["scores"], strict=True))
    assert order["▁a"] > order["ab"] > order["▁ab"] > order["a"]


def test_without_a_byte_token(tmp_path: Path) -> None:
    model = sentence_piece(tmp_path / "model")
    text = (model / "tokenizer.json").read_text().replace("<0x0A>", "<0xZZ>")
    (model / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match="no token <0x0A>"):
        vocabulary(model)


def test_kinds_ends_and_templates(tmp_path: Path) -> None:
    model = small(tmp_path / "model", "qwen2", vocab_size=4100)
    content = json.loads((model / "tokenizer.json").read_text())
    content["added_tokens"] += [token(4096, "<|mark|>", False), token(4097, "<think>", False), token(4098, "<stop>")]
    content["added_tokens"][-1]["lstrip"] = True
    (model / "tokenizer.json").write_text(json.dumps(content))
    # The tokenizer's eos is no end of a turn, as in base models; llama.cpp has place for one end that it does not know.
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<|endoftext|>"}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [4093, 4097, 4098, 99999]}))
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{% generation %}x{%- endgeneration %}")
    found = vocabulary(model)
    assert found.kinds[4093:] == [3, 3, 3, 3, 4, 3, 5]
    assert found.tokens[4099] == "[PAD4099]"
    assert found.special == {"eos": 4093, "eot": 4095, "eom": 4097, "pad": 4093}
    assert found.notes == [
        "llama.cpp keeps spaces next to <stop>, which this tokenizer removes.",
        "llama.cpp does not stop at <stop>: pass them as stop strings.",
    ]
    assert found.templates["tool_use"] == "{# #}x{#- #}"
    export_model(model, tmp_path / "model.gguf")
    facts, _ = read(tmp_path / "model.gguf")
    assert facts["tokenizer.chat_template.tool_use"] == "{# #}x{#- #}"
    assert facts["tokenizer.chat_templates"] == ["tool_use"]
    assert "<|im_start|>" in facts["tokenizer.chat_template"]


def test_the_demo_adds_nothing() -> None:
    found = vocabulary(DEMO)
    assert (found.add_bos, found.add_eos, found.notes) == (False, False, [])
