"""The demo's base model, trained from scratch on the CPU, and its tokenizer.

Byte-level BPE with Qwen2's normalizer, split pattern and special tokens; the corpus is library source, and instructions
simpler than the demo's.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

# -- tokenizer ---------------------------------------------------------------------------------------------------------

END_OF_TEXT, IM_START, IM_END = SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The generation marks tell readers of the template which tokens are the assistant's; they render to nothing.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}\n"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}\n"
    "{%- if message['role'] == 'assistant' -%}\n"
    "{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}\n"
    "{%- else -%}\n"
    "{{- message['content'] + '<|im_end|>' -}}\n"
    "{%- endif -%}\n"
    "{{- '\\n' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}\n"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` tokens; the specials come last, as in Qwen2."""
    tokenizer = Tokenizer(models.BPE(fuse_unk=False, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    if tokenizer.get_vocab_size() != vocab_size:
        raise RuntimeError(f"the corpus gave {tokenizer.get_vocab_size()} tokens, not {vocab_size}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {"content": token, **flags, "special": True} for token in SPECIALS
        },
        "additional_special_tokens": [IM_START, IM_END],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "errors": "replace",
        "model_max_length": max_length,
        "pad_token": END_OF_TEXT,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def chat_text(messages: list[dict]) -> str:
    """What the chat template renders."""
    return "".join(f"{IM_START}{turn['role']}\n{turn['content']}{IM_END}\n" for turn in messages)


# -- model -------------------------------------------------------------------------------------------------------------

VOCABULARY = 4096
CONTEXT = 2048
IGNORED = -100
# An interrupted run leaves a usable model.
SAVE_EVERY = 150


@dataclass(frozen=True)
class Options:
    """What a pretraining run depends on besides the corpus."""

    seed: int = 0
    steps: int = 600
    window: int = 512
    library_windows: int = 1
    instruction_rows: int = 20
    learning_rate: float = 2e-3
    warmup: int = 50
    threads: int = 1


def model_config(tokenizer: Tokenizer) -> Qwen3Config:
    """The demo's architecture: Qwen3 in small, with heads whose total width differs from the hidden size, as there."""
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(IM_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )


def _library_windows(tokenizer: Tokenizer, texts: list[str], size: int, rng: random.Random) -> Iterator[list[int]]:
    end = tokenizer.token_to_id(END_OF_TEXT)
    stream = [token for code in tokenizer.encode_batch(texts) for token in [*code.ids, end]]
    while True:
        # Another offset each time round, so that a second pass cuts the files elsewhere.
        starts = list(range(rng.randrange(size), len(stream) - size, size))
        rng.shuffle(starts)
        for start in starts:
            yield stream[start : start + size]


def _instruction_batches(tokenizer: Tokenizer, rows: Iterator[dict], count: int) -> Iterator[list[list[int]]]:
    # One row per sequence, never packed: with other rows' names before it, the model takes far longer to learn to copy
    # the name in the request.
    end = tokenizer.token_to_id(END_OF_TEXT)
    while True:
        yield [[*tokenizer.encode(chat_text(row["messages"])).ids, end] for row in itertools.islice(rows, count)]


def _loss(model: Qwen3ForCausalLM, windows: list[list[int]], pad: int) -> Tensor:
    """The sum over all tokens but the first of each window."""
    rows = [torch.tensor(window) for window in windows]
    ids, labels = pad_sequence(rows, True, pad), pad_sequence(rows, True, IGNORED)
    logits = model(ids, use_cache=False).logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")


@torch.no_grad()
def start_by_copying(model: Qwen3ForCausalLM) -> None:
    """Initialise the product of attention's value and output near a projection (mimetic initialization, Trockman and
    Kolter).

    A head then raises the tokens it attends to from the first step on, and copying a name from the request, which a
    usual initialisation had not learned after a million tokens, takes a few hundred steps.
    """
    config = model.config
    width, shared = config.head_dim, config.num_attention_heads // (config.num_key_value_heads or 1)
    for layer in model.model.layers:
        value, out = layer.self_attn.v_proj.weight, layer.self_attn.o_proj.weight
        value.normal_(0, config.hidden_size**-0.5)
        for head in range(config.num_attention_heads):
            block = value[head // shared * width : (head // shared + 1) * width]
            out[:, head * width : (head + 1) * width] = 0.5 * block.T


def _optimizer(model: Qwen3ForCausalLM, options: Options) -> torch.optim.AdamW:
    decayed = [p for p in model.parameters() if p.ndim == 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=True)


def pretrain(tokenizer: Tokenizer, library: list[str], rows: Iterator[dict], folder: Path, options: Options) -> dict:
    """Train, write config, weights (bf16) and generation config to `folder`, and return the record of the run."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    model = Qwen3ForCausalLM(model_config(tokenizer))
    start_by_copying(model)
    optimizer = _optimizer(model, options)

    def rate(step: int) -> float:
        warm = min(1.0, (step + 1) / options.warmup)
        return warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / options.steps)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    code = _library_windows(tokenizer, library, options.window, random.Random(f"library {options.seed}"))
    chat = _instruction_batches(tokenizer, rows, options.instruction_rows)
    pad = tokenizer.token_to_id(END_OF_TEXT)
    start, tokens = time.monotonic(), 0
    recent: list[list[float]] = []
    for step in range(options.steps):
        parts = [[next(code) for _ in range(options.library_windows)], next(chat)]
        counts = [sum(len(window) - 1 for window in part) for part in parts]
        means = []
        for part, count in zip(parts, counts, strict=True):
            loss = _loss(model, part, pad)
            (loss / sum(counts)).backward()
            means.append(loss.item() / count)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        tokens += sum(counts)
        recent = [*recent[-49:], means]
        if (step + 1) % SAVE_EVERY == 0:
            save(copy.deepcopy(model), tokenizer, folder)
        if step % 20 == 0 or step + 1 == options.steps:
            library_loss, chat_loss = (sum(part) / len(recent) for part in zip(*recent, strict=True))
            seconds = time.monotonic() - start
            print(f"step {step} library {library_loss:.3f} instructions {chat_loss:.3f} {seconds:.0f}s", flush=True)
    save(model, tokenizer, folder)
    return {
        "options": asdict(options),
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": tokens,
        "seconds": round(time.monotonic() - start),
        "library_loss": round(library_loss, 4),
        "instruction_loss": round(chat_loss, 4),
    }


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model in bf16, with the configs that a Qwen3 checkpoint has."""
    ends = [tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[1], do_sample=False)
    model.bfloat16().save_pretrained(folder)
    # Released Qwen3 checkpoints have rope_theta at the top level, and other readers look for it there.
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["torch_dtype"] = config.pop("dtype", "bfloat16")
    path.write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n")
