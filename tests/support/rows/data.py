"""What the data tests share: a small byte-level tokenizer, the fixture templates and files on disk."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from support import FIXTURES as _ALL
from wgpu_lora.data import Tokenizer

FIXTURES = _ALL / "data"
TEMPLATES = ("chatml", "chatml_marked", "thinking", "headers", "strict")
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
_CORPUS = [
    "What is the colour of the sky? The sky is blue, and the sea is blue too.",
    "user assistant system\n\n Give me an answer. This is the answer: forty-two.\n\n",
    "Below is an instruction that describes a task. Write a response that completes the request.",
]


# How Llama 3 and Qwen split text. GPT-2's older way takes the last line break off "\n\n" when a word follows it.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def backend_json(as_gpt2: bool = False) -> str:
    """The small tokenizer's `tokenizer.json`, with Llama 3's or GPT-2's way to split text."""
    backend = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(_SPLIT), "isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = (
        pre_tokenizers.ByteLevel(add_prefix_space=False) if as_gpt2 else pre_tokenizers.Sequence([split, bytes_only])
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return backend.to_str()


def template_source(name: str) -> str:
    return (FIXTURES / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def small_tokenizer(template: str | None = None) -> Tokenizer:
    """The small tokenizer with one of the fixture templates, or none."""
    templates = {} if template is None else {"default": template_source(template)}
    backend = tokenizers.Tokenizer.from_str(backend_json())
    return Tokenizer(backend, special_tokens=NAMED, chat_templates=templates)


def write_jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def chat(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    """Messages that user and assistant write in turn."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    return messages + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def trained_text(tokenizer: Tokenizer, labels: list[int]) -> list[str]:
    """The stretches of trained tokens, each decoded with its special tokens."""
    runs: list[list[int]] = [[]]
    for label in labels:
        if label == -100:
            runs.append([])
        else:
            runs[-1].append(label)
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs if run]
