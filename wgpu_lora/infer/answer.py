"""Prompts in, answers out: texts, each under an adapter of its own or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wgpu_lora.data import StreamDecoder
from wgpu_lora.errors import UserError
from wgpu_lora.infer.generate import Generator
from wgpu_lora.infer.named import on_device
from wgpu_lora.infer.prompt import chat_prompt
from wgpu_lora.models.load import Progress
from wgpu_lora.models.loaded import LoadedModel

OnText = Callable[[str], None]
OnDone = Callable[[int], None]


@dataclass(frozen=True)
class Answer:
    """What a model said to a prompt, and how it came to an end: stop, length or capacity.

    tokens_per_second: of all prompts that were answered together.
    """

    prompt: str
    text: str
    token_ids: list[int]
    stop_reason: str
    tokens_per_second: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def answer_slots(
    model: LoadedModel,
    prompts: Sequence[str],
    directories: Sequence[str | Path],
    slots: Sequence[int | None],
    *,
    system: str | None,
    enable_thinking: bool | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int,
    batch: int,
    on_text: OnText | None,
    on_done: OnDone,
    progress: Progress,
) -> list[Answer]:
    """Answers prompts[i] under the adapter of directories[slots[i]], or under the base alone where that is None.

    Raises:
        UserError: there is no tokenizer, a prompt is too long, an adapter does not fit, or a value is out of range.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise UserError(
            f"The model {model.name} has no tokenizer.json, so it cannot read text: add one to its directory."
        )
    kwargs = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    ids = [chat_prompt(tokenizer, prompt, system, **kwargs) for prompt in prompts]
    decoder = StreamDecoder(tokenizer)
    count = 0

    def on_token(number: int, token: int) -> None:
        nonlocal count
        count += 1
        on_done(count)
        if on_text:
            on_text(decoder.push(token))

    # No more cache than these prompts can use.
    longest = max(map(len, ids)) + max(1, max_new_tokens)
    capacity = min(longest, model.config.max_position_embeddings)
    with (
        on_device(model, directories) as adapters,
        Generator(model, adapters, capacity, min(batch, len(ids)), progress=progress) as generator,
    ):
        found = generator.generate(
            ids,
            slots,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop_ids=tokenizer.stop_ids,
            on_token=on_token,
        )
    if on_text:
        on_text(decoder.flush())
    return [
        Answer(prompt, tokenizer.decode(g.token_ids), g.token_ids, g.stop_reason, round(g.decode_speed, 2))
        for prompt, g in zip(prompts, found, strict=True)
    ]
