"""Greedy answers: to held-out prompts with a model in NF4, keeping the logits; and to all requests, unit-checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np

from wgpu_lora.checks.run import run_check
from wgpu_lora.data import UNTRAINED, Row, Tokenizer
from wgpu_lora.data.examples import Conversation
from wgpu_lora.demo.compare import BATCH, NEW_TOKENS
from wgpu_lora.infer import Generator
from wgpu_lora.infer.answer import tokenizer_of
from wgpu_lora.infer.named import on_device
from wgpu_lora.models.loaded import LoadedModel, open_model
from wgpu_lora.proof.heldout import request_of, rows_of, shown
from wgpu_lora.train.finetune import read_run
from wgpu_lora.train.options.arguments import TrainingArguments
from wgpu_lora.weights.registry import DEFAULT_FORMAT
from wgpu_lora.worker.child import Port

PROMPTS, SHORT = 4, 48  # rows that are continued, by how many tokens
KEPT = 16  # positions of each answer whose logits are kept whole


def generate(port: Port, *, options: dict[str, Any], device: int, arrays: str) -> dict[str, Any]:
    """Logits go to the .npz file `arrays`, one [positions, vocab] for each prompt; the rest is returned."""
    args, model = opened(options, device)
    heldout = read_run(args, model).heldout
    assert heldout, "a proof's recipe has held-out data"
    prompts = [prompt_of_row(row) for row in heldout.rows[:PROMPTS]]
    logits: list[list[np.ndarray]] = [[] for _ in prompts]
    gaps: list[list[float]] = [[] for _ in prompts]
    stop_ids = model.tokenizer.stop_ids if model.tokenizer else ()
    with generator_for(model, prompts, SHORT) as generator:

        def keep(sequence: int, token: int) -> None:
            row = generator.state.read_logits(model.device)[sequence]
            second, first = np.partition(row, -2)[-2:]
            gaps[sequence].append(float(first - second))
            if len(logits[sequence]) < KEPT:
                logits[sequence].append(row.copy())

        found = generator.generate(prompts, None, SHORT, stop_ids=stop_ids, on_token=keep)
    np.savez(arrays, *(np.array(kept) for kept in logits))  # arr_0, arr_1 ...
    linears = [item.weight for layer in model.decoder.layers for item in layer.linears.values()]
    decode = model.tokenizer.decode if model.tokenizer else str
    return {
        "matrices": len(linears),
        "packed_matrices": sum(weight.format == DEFAULT_FORMAT for weight in linears),
        "answers": [{"ids": g.token_ids, "gaps": gaps[i], "text": decode(g.token_ids)} for i, g in enumerate(found)],
    }


def answers(
    port: Port, *, options: dict[str, Any], device: int, adapter: str | None, allow_unconfined: bool = False
) -> list[dict[str, Any]]:
    """Answers every held-out request with an adapter, or without, and runs each answer against its unit check."""
    args, model = opened(options, device)
    tokenizer = tokenizer_of(model)
    assert args.eval_data, "a proof's recipe has held-out data"
    rows = list(rows_of(args.eval_data).values())
    requests = [request for row in rows if (request := request_of(row))]
    prompts = [prompt_of(request, tokenizer, args.template_kwargs()) for request in requests]
    slots = [0 if adapter else None] * len(prompts)
    with generator_for(model, prompts, NEW_TOKENS, adapter) as generator:
        made = generator.generate(prompts, slots, NEW_TOKENS, stop_ids=tokenizer.stop_ids)
    found = []
    for request, row, one in zip(requests, rows, made, strict=True):
        text = tokenizer.decode(one.token_ids)
        verdict = run_check(text, row["check"], allow_unconfined=allow_unconfined)
        found.append({"request": shown(request), "text": text, "passed": verdict.passed, **asdict(verdict)})
    return found


def opened(options: dict[str, Any], device: int) -> tuple[TrainingArguments, LoadedModel]:
    args = TrainingArguments(**options)
    return args, open_model(args.model or "demo", device, args.base_dtype)


@contextmanager
def generator_for(
    model: LoadedModel, prompts: Sequence[Sequence[int]], new_tokens: int, adapter: str | None = None
) -> Iterator[Generator]:
    capacity = min(max(map(len, prompts)) + new_tokens, model.config.max_position_embeddings)
    with (
        on_device(model, [adapter] if adapter else []) as adapters,
        Generator(model, adapters, capacity, min(BATCH, len(prompts))) as generator,
    ):
        yield generator


def prompt_of_row(row: Row) -> list[int]:
    """The tokens before the first that is trained, or half of a row that is trained on from its start."""
    trained = np.flatnonzero(row.labels != UNTRAINED)
    first = int(trained[0]) if trained.size else 0
    return row.input_ids[: first or max(1, len(row.input_ids) // 2)].tolist()


def prompt_of(request: Conversation, tokenizer: Tokenizer, template_kwargs: dict[str, Any]) -> list[int]:
    """Token ids that ask for the turn after a request's messages, as in training: a row's own kwargs take priority."""
    kwargs = {**template_kwargs, **request.template_kwargs}
    return tokenizer.encode(tokenizer.render(request.messages, request.tools, True, kwargs))
