"""Converts a tokenizer to GGUF's metadata: tokens, types, merges or scores, special ids, chat templates."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType

from wgpu_lora.errors import UserError
from wgpu_lora.formats.tokenizer.gguf_tokenizer import Splitting, merges_of, splitting_of
from wgpu_lora.formats.tokenizer.tokenizer import Tokenizer
from wgpu_lora.models.model_config import ModelConfig

# llama.cpp stops at these tokens if they are in the vocabulary.
KNOWN_ENDS = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "</s>", "<|eom_id|>", "<|end_of_text|>"}
# The training mask of a chat template, which llama.cpp does not know. A comment trims the same spaces.
_GENERATION = re.compile(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass
class Vocabulary:
    """The content of tokenizer.ggml.*, with `scores` for SentencePiece tokenizers and `merges` for others.

    notes: on tokens and stops that differ in llama.cpp.
    """

    splitting: Splitting
    tokens: list[str]
    kinds: list[int]
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    special: dict[str, int] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = False
    templates: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_vocabulary(tokenizer: Tokenizer | None, config: ModelConfig, model: Path) -> Vocabulary:
    """The vocabulary of a model, with a token for every row of its embedding.

    Args:
        model: path of the model, for errors.

    Raises:
        UserError: the model has no tokenizer, or llama.cpp does not support it.
    """
    if tokenizer is None:
        raise UserError(
            f"{model} has no tokenizer.json: a GGUF file holds its tokenizer, so put the model's own there."
        )
    where = f"The tokenizer of {model}"
    files = tokenizer.files()
    document = json.loads(files["tokenizer.json"])
    splitting = splitting_of(document, where)
    bpe, added_tokens = document["model"], {token["id"]: token for token in document.get("added_tokens") or []}
    texts = {id: text for text, id in bpe["vocab"].items()} | {
        id: token["content"] for id, token in added_tokens.items()
    }
    if max(texts, default=-1) >= config.vocab_size:
        raise UserError(
            f"{where} has token ids up to {max(texts):,}, but the model's embedding has {config.vocab_size:,} rows: "
            "use the tokenizer of the model."
        )
    unknown = bpe["vocab"].get(bpe.get("unk_token"), tokenizer.unk_id)
    result = Vocabulary(splitting, [], [], notes=list(splitting.notes))
    for id in range(config.vocab_size):
        text = texts.get(id, f"[PAD{id}]")
        kind = _kind(id, text, added_tokens, splitting, unknown) if id in texts else TokenType.UNUSED
        # llama.cpp matches these tokens in the text, which has spaces.
        result.tokens.append(text.replace("▁", " ") if kind == TokenType.USER_DEFINED else text)
        result.kinds.append(int(kind))
    pairs = merges_of(bpe)
    if splitting.model == "gpt2":
        result.merges = [f"{left} {right}" for left, right in pairs]
    else:
        _check_bytes(bpe["vocab"], where)
        result.scores = _scores(result.tokens, pairs)
    trimming = [token["content"] for token in added_tokens.values() if token.get("lstrip") or token.get("rstrip")]
    if trimming:
        result.notes.append(f"llama.cpp keeps spaces next to {', '.join(trimming[:3])}, which this tokenizer removes.")
    result.templates = {
        "default" if name == "chat_template.jinja" else Path(name).stem: _GENERATION.sub(r"{#\1 \2#}", source)
        for name, source in files.items()
        if name.endswith(".jinja")
    }
    _describe(result, tokenizer, unknown)
    return result


def _kind(id: int, text: str, added_tokens: dict[int, Any], splitting: Splitting, unknown: int | None) -> TokenType:
    if splitting.model == "llama":
        if id == unknown:
            return TokenType.UNKNOWN
        if _BYTE.fullmatch(text):
            return TokenType.BYTE
    if id not in added_tokens:
        return TokenType.NORMAL
    # Not all models declare their markers as special; llama.cpp's converter does not rely on it either.
    if added_tokens[id].get("special") or (text.startswith("<|") and text.endswith("|>")):
        return TokenType.CONTROL
    return TokenType.USER_DEFINED


def _check_bytes(vocabulary: dict[str, int], where: str) -> None:
    missing = [text for text in (f"<0x{byte:02X}>" for byte in range(256)) if text not in vocabulary]
    if missing:
        raise UserError(
            f"{where} has no token {missing[0]}, but llama.cpp needs one for every byte: use another model."
        )


def _scores(tokens: list[str], pairs: list[list[str]]) -> list[float]:
    """Scores of tokens for llama.cpp, which merges the pair whose token scores highest: minus the rank of its merge."""
    ranks: dict[str, int] = {}
    for left, right in pairs:
        ranks.setdefault(left + right, len(ranks))
    return [-float(ranks.get(token, len(ranks))) for token in tokens]


def _describe(vocabulary: Vocabulary, tokenizer: Tokenizer, unknown: int | None) -> None:
    """Sets special ids, and the tokens added before and after a text."""
    bare, whole = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=True)
    opening = tokenizer.prefix_ids
    closing = whole[len(opening) + len(bare) :]
    bos = tokenizer.bos_id if tokenizer.bos_id is not None or not opening else opening[0]
    ids = {"bos": bos, "eos": tokenizer.eos_id, "unk": unknown, "pad": tokenizer.pad_id}
    count = len(vocabulary.tokens)
    vocabulary.special = {name: id for name, id in ids.items() if id is not None and id < count}
    vocabulary.add_bos, vocabulary.add_eos = bool(opening), bool(closing)
    if opening not in ([], [bos]) or closing not in ([], [tokenizer.eos_id]):
        vocabulary.notes.append("the tokenizer adds tokens other than bos and eos to a text, which llama.cpp does not.")
    eos = vocabulary.special.get("eos")
    ends = sorted(id for id in tokenizer.stop_ids if id != eos and id < count)
    # The end of a turn first, since that is what chat templates use.
    template = "".join(vocabulary.templates.values())
    ends.sort(key=lambda id: vocabulary.tokens[id] not in template)
    if ends and vocabulary.tokens[ends[0]] in template:
        vocabulary.special["eot"] = ends.pop(0)
    elif eos is not None and vocabulary.tokens[eos] in template:
        vocabulary.special["eot"] = eos
    other_ends = [id for id in ends if vocabulary.tokens[id] not in KNOWN_ENDS]
    if other_ends:
        vocabulary.special["eom"] = other_ends.pop(0)
    if other_ends:
        texts = ", ".join(vocabulary.tokens[id] for id in other_ends)
        vocabulary.notes.append(f"llama.cpp does not stop at {texts}: pass them as stop strings.")


def write_vocabulary(writer: GGUFWriter, vocabulary: Vocabulary) -> None:
    """tokenizer.*"""
    writer.add_tokenizer_model(vocabulary.splitting.model)
    writer.add_tokenizer_pre(vocabulary.splitting.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)
    if vocabulary.splitting.model == "llama":
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.splitting.space_prefix)
    else:
        writer.add_token_merges(vocabulary.merges)
    for name, id in vocabulary.special.items():
        getattr(writer, f"add_{name}_token_id")(id)
    writer.add_add_bos_token(vocabulary.add_bos)
    writer.add_add_eos_token(vocabulary.add_eos)
    if vocabulary.templates:
        writer.add_chat_template(
            [{"name": name, "template": source} for name, source in sorted(vocabulary.templates.items())]
        )
