"""llama.cpp splits texts into the ids that `tokenizers` does, and ends where we end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
import tokenizers
from llama_cpp.llama_chat_format import Jinja2ChatFormatter
from llama_cpp_helpers import opened
from support.gguf_models import DEMO, make_model
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from wgpu_lora.formats.tokenizer.gguf_tokenizer import NAMES
from wgpu_lora.formats.tokenizer.tokenizer import Tokenizer
from wgpu_lora.models.export.gguf_export import export_model

REGEX = {name: pattern for pattern, name in NAMES.items()}
TINY = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
NASTY = [
    "Hello, world! I'm sure we've DON'T they'LL it'S 'tis",
    "1 22 333 4444 55555 3.14159 1,000,000 0xDEADBEEF １２３ ½ ²³",
    "  leading and   many    spaces\tand\ttabs \t mixed  ",
    "line\nline\r\nline\n\n\n  indented\n\t\ttabbed\n   \n end\n",
    "def f(x):\n    return {k: v**2 for k, v in x.items() if v != 0}  # comment\n\n\nclass A: ...",
    "日本語のテキスト、中文文本。한국어 텍스트! Ελληνικά Русский العربية עברית ไทย हिन्दी",
    "emoji 😀😃 👨‍👩‍👧‍👦 🏳️‍🌈 ✊🏽 ☃︎ \u200b\u200d\ufeff zero\u00a0width\u3000wide\u2028sep",
    "naïve café résumé Straße ŒUVRE ĳ ǅ ª º",
    "!!!???...---___***   ///\\\\\\ <<<>>> [](){} @#$%^&*~`|;:\"'",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|>b <|im_end|> c<|endoftext|><|endoftext|>d",
    "▁literal▁marks ▁ and Ġ Ċ bytes",
    "",
    " ",
    "\n",
    "x",
]


def trained(directory: Path, name: str) -> Path:
    """A tokenizer of the kind that llama.cpp calls `name`, trained on the demo's data and the texts above."""
    digits = [pre_tokenizers.Digits(individual_digits=True)] if name == "smollm" else []
    if name in REGEX:
        digits = [pre_tokenizers.Split(tokenizers.Regex(REGEX[name]), "isolated")]
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=name in ("llama-bpe", "tekken")))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name not in REGEX)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, last]) if digits else last
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False)
    text = (DEMO.parent / "data" / "heldout.jsonl").read_text()
    backend.train_from_iterator([text, *NASTY[:9]], trainer)
    specials = ["<|begin|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    if name == "llama-bpe":
        begin = backend.token_to_id("<|begin|>")
        backend.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
        )
    return saved(directory, backend, {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"})


def sentence_piece(directory: Path, metaspace: bool) -> Path:
    """As transformers converts one of SentencePiece: every way to make a token is a merge, in the order of the ids."""
    trainer = trainers.BpeTrainer(vocab_size=900, show_progress=False)
    source = tokenizers.Tokenizer(models.BPE())
    source.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    source.train_from_iterator((DEMO.parent / "data" / "heldout.jsonl").read_text().splitlines(), trainer)
    spm_model = json.loads(source.to_str())["model"]
    order = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    joined = ["".join(merge) for merge in spm_model["merges"]]
    order += list(dict.fromkeys([*joined, *(text for text in spm_model["vocab"] if len(text) == 1)]))
    vocabulary = {text: id for id, text in enumerate(order)}
    merges = [
        (text[:cut], text[cut:])
        for text in dict.fromkeys(joined)
        for cut in range(1, len(text))
        if text[:cut] in vocabulary and text[cut:] in vocabulary
    ]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always", split=False)
    else:
        backend.normalizer = source.normalizer
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return saved(directory, backend, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})


def saved(directory: Path, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> Path:
    directory.mkdir()
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def exported(tmp_path: Path, directory: Path) -> tuple[Tokenizer, llama_cpp.Llama]:
    tokenizer = Tokenizer.load(directory)
    assert tokenizer is not None
    stated = {**TINY, "vocab_size": tokenizer.vocab_size + 5}  # padded, as many embeddings are
    model = make_model(tmp_path / "model", stated, tokenizer=directory)
    export_model(model, tmp_path / "model.gguf")
    return tokenizer, llama_cpp.Llama(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False)


@pytest.mark.parametrize("name", ["qwen2", "llama-bpe", "tekken", "smollm", "gpt-2", "prepend", "metaspace"])
def test_the_ids_of_nasty_texts(tmp_path: Path, name: str) -> None:
    piece = name in ("prepend", "metaspace")
    source = sentence_piece(tmp_path / "t", name == "metaspace") if piece else trained(tmp_path / "t", name)
    tokenizer, model = exported(tmp_path, source)
    marks = ("<s>hi</s>there</s>",) if piece else ("<think>so</think> yes", "<|begin|>x")
    for text in [*NASTY, *marks]:
        # What the notes say of these two.
        if (name == "tekken" and "हिन्दी" in text) or (name == "metaspace" and text.startswith((" ", "▁"))):
            continue
        for add in (False, True):
            token_ids = model.tokenize(text.encode(), add_bos=add, special=True)
            assert token_ids == tokenizer.encode(text, add_special_tokens=add), (text, add)
    assert model.detokenize(tokenizer.encode(NASTY[4])).decode().strip() == NASTY[4].strip()


def test_the_demo_renders_the_same_prompt_and_stops(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(DEMO)
    assert tokenizer is not None
    export_model(DEMO, tmp_path / "demo.gguf")
    model = opened(tmp_path / "demo.gguf", context=1024)
    for text in NASTY:
        assert model.tokenize(text.encode(), add_bos=True, special=True) == tokenizer.encode(text, True)
    rows = [json.loads(line) for line in (DEMO.parent / "data" / "heldout.jsonl").read_text().splitlines()[:4]]
    for row in rows:
        question = row["messages"][:1]
        rendered = Jinja2ChatFormatter(model.metadata["tokenizer.chat_template"], "<|im_end|>", "")(messages=question)
        prompt = tokenizer.encode(tokenizer.render(question, add_generation_prompt=True))
        assert model.tokenize(rendered.prompt.encode(), add_bos=True, special=True) == prompt
        answer = model.create_chat_completion(question, temperature=0, max_tokens=200)["choices"][0]
        assert answer["finish_reason"] == "stop"
        assert answer["message"]["content"].startswith("def ")
        assert "<|im_end|>" not in answer["message"]["content"]
    ends = {id for id in range(4096) if llama_cpp.llama_vocab_is_eog(llama_cpp.llama_model_get_vocab(model.model), id)}
    assert ends == tokenizer.stop_ids


def test_an_end_that_llama_cpp_does_not_know_by_name(tmp_path: Path) -> None:
    source = trained(tmp_path / "t", "qwen2")
    tokenizer = Tokenizer.load(source)
    assert tokenizer is not None
    think = tokenizer.token_id("</think>")
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [think]}))
    tokenizer, model = exported(tmp_path, source)
    vocabulary = llama_cpp.llama_model_get_vocab(model.model)
    assert think in tokenizer.stop_ids
    for id in tokenizer.stop_ids:
        assert llama_cpp.llama_vocab_is_eog(vocabulary, id)
