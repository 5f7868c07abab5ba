"""Answers every held-out request greedily and runs each answer against its unit check."""

from __future__ import annotations

from typing import Any

from wgpu_lora.api import load
from wgpu_lora.data import Tokenizer
from wgpu_lora.data.formats import Conversation
from wgpu_lora.demo.check import run_check
from wgpu_lora.demo.compare import BATCH, NEW_TOKENS
from wgpu_lora.errors import UserError
from wgpu_lora.infer import Generator
from wgpu_lora.infer.named import on_device
from wgpu_lora.proof.heldout import request_of, rows_of, shown
from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.worker.child import Port


def run(
    port: Port, *, options: dict[str, Any], device: int, adapter: str | None, allow_unconfined: bool = False
) -> list[dict[str, Any]]:
    args = TrainingArguments(**options)
    assert args.eval_data, "a proof's recipe has held-out data"
    rows = list(rows_of(args.eval_data).values())
    requests = [request for row in rows if (request := request_of(row))]
    model = load(args.model or "demo", device=device, base_dtype=args.base_dtype)
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise UserError(f"The model {model.name} has no tokenizer.json, so it cannot be asked anything: add one.")
    prompts = [prompt_of(request, tokenizer, args.template_kwargs()) for request in requests]
    capacity = min(max(map(len, prompts)) + NEW_TOKENS, model.config.max_position_embeddings)
    with on_device(model, [adapter] if adapter else []) as adapters:
        model.load_weights()
        with Generator(model, adapters, capacity, min(BATCH, len(prompts))) as generator:
            slots = [0 if adapters else None] * len(prompts)
            found = generator.generate(
                prompts, slots, max_new_tokens=NEW_TOKENS, temperature=0.0, stop_ids=tokenizer.stop_ids
            )
    answers = []
    for request, row, generated in zip(requests, rows, found, strict=True):
        text = tokenizer.decode(generated.token_ids)
        verdict = run_check(text, row["check"], allow_unconfined=allow_unconfined)
        said = {"text": text, "parses": verdict.parses, "passed": verdict.passed, "reason": verdict.reason}
        answers.append({"request": shown(request), **said})
    return answers


def prompt_of(request: Conversation, tokenizer: Tokenizer, template_kwargs: dict[str, Any]) -> list[int]:
    """Token ids that ask for the turn after a request's messages, as training has them: a row's own kwargs win."""
    kwargs = {**template_kwargs, **request.template_kwargs}
    text = tokenizer.render(request.messages, request.tools, True, kwargs)
    return tokenizer.encode(text)
