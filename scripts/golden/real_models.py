"""Makes tests/fixtures/real/NAME.{json,safetensors} for a published model's GGUF file, with torch, transformers, PEFT and TRL.

    python -m scripts.golden.real_models smollm2 FILE.gguf [OUTPUT]
    python -m scripts.golden.real_models gemma3 FILE.gguf [OUTPUT]

All arithmetic is float32, on the values that transformers dequantises. Needs the `reference` and `exchange` extras.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

from scripts.golden import golden_preferences
from scripts.golden.golden_training import continued, with_adapter
from scripts.golden.real_cases import (
    ALPHA, BETA, CHATS, LEARNING_RATE, LOGIT_ROWS, LOGIT_STRIDE, ODD_TEXTS, PAIRS, PREFERENCE_LEARNING_RATE,
    PREFERENCE_STEPS, PROMPTS, RANK, STEPS, TEXT, WEIGHT_DECAY, adapter_summary, initial_adapter, rows_of,
)  # fmt: skip
from scripts.golden.tiny_models import linears

FIXTURES = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "real"
IGNORE = -100
Arrays = dict[str, np.ndarray]
Values = dict[str, Any]


def forward(model: torch.nn.Module, tokenizer: Any) -> tuple[Values, Arrays]:
    """The ids of TEXT, their mean loss and a sample of their logits."""
    ids = tokenizer.encode(TEXT)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float()
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])).item()
    return {"text_ids": ids, "loss": loss}, {"logits": logits[:LOGIT_ROWS, ::LOGIT_STRIDE].numpy()}


def token_ids(name: str, file: Path, tokenizer: Any) -> list[list[int]]:
    """Of ODD_TEXTS.

    llama.cpp's for SmolLM2, because transformers loses the digits' own pieces ("½") when it reads a GGUF file;
    transformers' for Gemma, because llama.cpp does not find the spaces of "a▁▁b".
    """
    theirs = [tokenizer.encode(text, add_special_tokens=False) for text in ODD_TEXTS]
    model = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    llama = [model.tokenize(text.encode(), add_bos=False, special=True) for text in ODD_TEXTS]
    different = [text for text, a, b in zip(ODD_TEXTS, theirs, llama, strict=True) if a != b]
    assert different == {"smollm2": ["ﬁ ½ ① Å Å"], "gemma3": ["a▁▁b"]}[name], different
    return llama if name == "smollm2" else theirs


def chats(model: transformers.PreTrainedModel, tokenizer: Any) -> Values:
    """Conversations as the template renders them, and 64 greedy tokens of the first answer that rounding leaves alone."""
    prompts = ([{"role": "user", "content": text}] for text in PROMPTS)
    for number, prompt in enumerate(prompts):
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        tokens = continued(model, np.array(tokenizer.encode(text), np.int32))
        if tokens is not None and tokenizer.eos_token_id not in tokens:
            rendered = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in CHATS]
            return {"prompt": number, "rendered_prompt": text, "greedy": tokens.tolist(), "rendered": rendered}
    raise SystemExit("Rounding could change the tokens of all prompts: write others.")


def chat_row(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Ids and labels: the answer is trained, with its end token."""
    before = tokenizer.encode(tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True))
    answer = tokenizer.encode(messages[-1]["content"] + tokenizer.eos_token)
    return before + answer, [IGNORE] * len(before) + answer


def supervised(model: torch.nn.Module, tokenizer: Any) -> Callable[[int], torch.Tensor]:
    """The loss of a step of CHATS: the mean over the trained tokens of its rows."""
    rows = tuple(chat_row(tokenizer, row["messages"]) for row in CHATS)

    def loss(step: int) -> torch.Tensor:
        total, count = torch.zeros(()), 0
        for ids, labels in rows_of(step, rows):
            logits, targets = model(torch.tensor([ids])).logits[0, :-1], torch.tensor(labels[1:])
            total = total + torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
            count += int((targets != IGNORE).sum())
        return total / count

    return loss


def preferences(model: torch.nn.Module, tokenizer: Any) -> Callable[[int], torch.Tensor]:
    """The loss of a step of PAIRS by TRL's DPO trainer."""
    rows = tuple({f"{key}_ids": tokenizer.encode(text) for key, text in pair.items()} for pair in PAIRS)
    assert golden_preferences.BETA == BETA
    trainer = golden_preferences.dpo(model, {"loss_type": "sigmoid"})
    return lambda step: trainer(rows_of(step, rows))[0]


def train(
    base: transformers.PreTrainedModel,
    losses_of: Callable[[torch.nn.Module], Callable[[int], torch.Tensor]],
    steps: int,
    rate: float,
) -> tuple[list[float], list[float], Arrays]:
    """(losses, norms before clipping, what is kept of the adapter) of steps at a constant learning rate."""
    shapes = {f"{layer}.{module}": tuple(linear.weight.shape) for (layer, module), linear in linears(base).items()}
    start = initial_adapter(shapes)
    model, parameters = with_adapter(base, start, r=RANK, lora_alpha=ALPHA)
    optimizer = torch.optim.AdamW(parameters.values(), lr=rate, eps=1e-8, weight_decay=WEIGHT_DECAY)
    losses, norms, loss_of = [], [], losses_of(model)
    for step in range(steps):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, adapter_summary({n: p.detach().numpy() for n, p in parameters.items()}, start)


def references(name: str, file: Path, steps: int = STEPS) -> tuple[Values, Arrays]:
    """Everything that the fixture of the model holds; of training, at most `steps` steps."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    values, arrays = forward(model, tokenizer)
    values["token_ids"] = token_ids(name, file, tokenizer)
    if name == "gemma3":
        return values, arrays
    values |= chats(model, tokenizer)
    for case, losses_of, count, rate in (
        ("sft", supervised, STEPS, LEARNING_RATE),
        ("dpo", preferences, PREFERENCE_STEPS, PREFERENCE_LEARNING_RATE),
    ):
        of_model = partial(losses_of, tokenizer=tokenizer)
        losses, norms, kept = train(model, of_model, min(steps, count), rate)
        values |= {f"{case}_losses": losses, f"{case}_norms": norms}
        arrays |= {f"{case}.{key}": value for key, value in kept.items() if case == "sft" or key == "moved"}
    return values, arrays


def main(name: str, file: Path, output: Path = FIXTURES) -> None:
    values, arrays = references(name, file)
    output.mkdir(parents=True, exist_ok=True)
    save_file(arrays, output / f"{name}.safetensors")
    lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())
    (output / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
