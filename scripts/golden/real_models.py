"""Makes tests/fixtures/real/NAME.{json,safetensors} for a published model's GGUF file.

    python -m scripts.golden.real_models smollm2 FILE.gguf [OUTPUT]
    python -m scripts.golden.real_models gemma3 FILE.gguf [OUTPUT]

By torch, transformers, PEFT and TRL, in float32 on the values that transformers dequantises. Needs the `reference` and
`exchange` extras.
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
from scripts.golden import real_cases as cases
from scripts.golden.golden_training import continued, with_adapter
from scripts.golden.tiny_models import linears

FIXTURES = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "real"
IGNORE = -100
Arrays = dict[str, np.ndarray]
Values = dict[str, Any]


def forward(model: torch.nn.Module, tokenizer: Any) -> tuple[Values, Arrays]:
    """The ids of cases.TEXT, their mean loss and a sample of their logits."""
    ids = tokenizer.encode(cases.TEXT)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float()
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])).item()
    return {"text_ids": ids, "loss": loss}, {
        "logits": logits[: cases.LOGIT_ROWS, :: cases.LOGIT_STRIDE].contiguous().numpy()
    }


def token_ids(name: str, file: Path, tokenizer: Any) -> list[list[int]]:
    """Of cases.ODD_TEXTS.

    llama.cpp's for SmolLM2, because transformers loses the digits' own pieces ("½") when it reads a GGUF file;
    transformers' for Gemma, because llama.cpp does not find the spaces of "a▁▁b".
    """
    transformers_ids = [tokenizer.encode(text, add_special_tokens=False) for text in cases.ODD_TEXTS]
    model = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    llama = [model.tokenize(text.encode(), add_bos=False, special=True) for text in cases.ODD_TEXTS]
    different = [text for text, a, b in zip(cases.ODD_TEXTS, transformers_ids, llama, strict=True) if a != b]
    assert different == {"smollm2": ["ﬁ ½ ① Å Å"], "gemma3": ["a▁▁b"]}[name], different
    return llama if name == "smollm2" else transformers_ids


def chats(model: transformers.PreTrainedModel, tokenizer: Any) -> Values:
    """Conversations as the template renders them, and 64 greedy tokens that rounding cannot change."""
    prompts = ([{"role": "user", "content": text}] for text in cases.PROMPTS)
    for number, prompt in enumerate(prompts):
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        tokens = continued(model, np.array(tokenizer.encode(text), np.int32))
        if tokens is not None and tokenizer.eos_token_id not in tokens:
            rendered = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in cases.CHATS]
            return {"prompt": number, "rendered_prompt": text, "greedy": tokens.tolist(), "rendered": rendered}
    raise SystemExit("Rounding could change the tokens of all prompts: write others.")


def answer(model: torch.nn.Module, tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """The greedy answer, of at most cases.ANSWER_TOKENS tokens."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer.encode(text)])
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=cases.ANSWER_TOKENS
    )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def chat_row(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Ids and labels: the answer is trained, with its end token."""
    before = tokenizer.encode(tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True))
    answer = tokenizer.encode(messages[-1]["content"] + tokenizer.eos_token)
    return before + answer, [IGNORE] * len(before) + answer


def supervised(model: torch.nn.Module, tokenizer: Any) -> Callable[[int], torch.Tensor]:
    """The loss of a step, which trains one row of cases.CHATS."""
    rows = tuple(chat_row(tokenizer, row["messages"]) for row in cases.CHATS)

    def loss(step: int) -> torch.Tensor:
        ids, labels = rows[step % len(rows)]
        logits, targets = model(torch.tensor([ids])).logits[0, :-1], torch.tensor(labels[1:])
        return torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE)

    return loss


def preferences(model: torch.nn.Module, tokenizer: Any) -> Callable[[int], torch.Tensor]:
    """The loss of a step, which trains one of cases.PAIRS, by TRL's DPO trainer."""
    rows = tuple({f"{key}_ids": tokenizer.encode(text) for key, text in pair.items()} for pair in cases.PAIRS)
    assert golden_preferences.BETA == cases.BETA
    trainer = golden_preferences.dpo(model, {"loss_type": "sigmoid"})
    return lambda step: trainer([rows[step % len(rows)]])[0]


def train(
    base: transformers.PreTrainedModel,
    losses_of: Callable[[torch.nn.Module], Callable[[int], torch.Tensor]],
    steps: int,
    rate: float,
) -> tuple[torch.nn.Module, list[float], list[float], Arrays]:
    """(model, losses, norms before clipping, what is kept of the adapter) of steps at a constant learning rate."""
    shapes = {f"{layer}.{module}": tuple(linear.weight.shape) for (layer, module), linear in linears(base).items()}
    start = cases.initial_adapter(shapes)
    model, parameters = with_adapter(base, start, r=cases.RANK, lora_alpha=cases.ALPHA)
    optimizer = torch.optim.AdamW(parameters.values(), lr=rate, eps=cases.EPSILON, weight_decay=cases.WEIGHT_DECAY)
    losses, norms, loss_of = [], [], losses_of(model)
    for step in range(steps):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0).item())
        optimizer.step()
        losses.append(loss.item())
    return model, losses, norms, cases.adapter_summary({n: p.detach().numpy() for n, p in parameters.items()}, start)


def references(name: str, file: Path, steps: int = cases.STEPS) -> tuple[Values, Arrays]:
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
        ("sft", supervised, cases.STEPS, cases.LEARNING_RATE),
        ("dpo", preferences, cases.PREFERENCE_STEPS, cases.PREFERENCE_LEARNING_RATE),
    ):
        of_model = partial(losses_of, tokenizer=tokenizer)
        adapted, losses, norms, summary = train(model, of_model, min(steps, count), rate)
        values |= {f"{case}_losses": losses, f"{case}_norms": norms}
        arrays |= {f"{case}.{key}": value for key, value in summary.items() if case == "sft" or key == "moved"}
        if case == "sft":
            values["answers"] = [
                answer(adapted, tokenizer, row["messages"][:-1]) for row in cases.CHATS[: cases.ANSWERS]
            ]
    return values, arrays


def main(name: str, file: Path, output: Path = FIXTURES) -> None:
    values, arrays = references(name, file)
    output.mkdir(parents=True, exist_ok=True)
    save_file(arrays, output / f"{name}.safetensors")
    lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())
    (output / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
