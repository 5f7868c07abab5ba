"""Greedy answers: to held-out prompts with a model in NF4, keeping the logits; and to all requests, unit-checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from wgpu_lora.data import Row, Tokenizer
from wgpu_lora.data.examples import Conversation
from wgpu_lora.demo.check import run_check
from wgpu_lora.demo.compare import BATCH, NEW_TOKENS
from wgpu_lora.infer import Generator
from wgpu_lora.infer.answer import tokenizer_of
from wgpu_lora.infer.named import on_device
from wgpu_lora.infer.running import Generation
from wgpu_lora.models.loaded import LoadedModel, open_model
from wgpu_lora.proof.heldout import request_of, rows_of, shown
from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.train.finetune import read_run
from wgpu_lora.weights.registry import DEFAULT_FORMAT
from wgpu_lora.worker.child import Port

PROMPTS, SHORT = 4, 48  # rows that are continued, by how many tokens
KEPT = 16  # positions of each answer whose logits are kept whole

OnLogits = Callable[[int, np.ndarray], None]  # (prompt's number, logits [vocab])


def generate(port: Port, *, options: dict[str, Any], device: int, arrays: str) -> dict[str, Any]:
    """Logits go to the .npz file `arrays`, one [positions, vocab] for each prompt; the rest is returned."""
    args, model = opened(options, device)
    heldout = read_run(args, model).heldout
    assert heldout, "a proof's recipe has held-out data"
    prompts = [prompt_of_row(row) for row in heldout.rows[:PROMPTS]]
    logits: list[list[np.ndarray]] = [[] for _ in prompts]
    gaps: list[list[float]] = [[] for _ in prompts]

    def keep(sequence: int, row: np.ndarray) -> None:
        second, first = np.partition(row, -2)[-2:]
        gaps[sequence].append(float(first - second))
        if len(logits[sequence]) < KEPT:
            logits[sequence].append(row.copy())

    found = greedy(model, prompts, SHORT, on_logits=keep)
    np.savez(arrays, *(np.array(kept) for kept in logits))  # arr_0, arr_1 ...
    linears = [item.weight for layer in model.decoder.layers for item in layer.linears.values()]
    decode = model.tokenizer.decode if model.tokenizer else str
    return {
        "matrices": len(linears),
        "packed_matrices": sum(weight.format == DEFAULT_FORMAT for weight in linears),
        "packed_bytes": sum({s: s.nbytes for weight in linears for s in weight.storages()}.values()),
        "answers": [{"ids": g.token_ids, "gaps": gaps[i], "text": decode(g.token_ids)} for i, g in enumerate(found)],
        "tokens_per_second": found[0].decode_speed,
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
    texts = [tokenizer.decode(made.token_ids) for made in greedy(model, prompts, NEW_TOKENS, adapter)]
    found = []
    for request, row, text in zip(requests, rows, texts, strict=True):
        verdict = run_check(text, row["check"], allow_unconfined=allow_unconfined)
        found.append({"request": shown(request), "text": text, **asdict(verdict)})
    return found


def opened(options: dict[str, Any], device: int) -> tuple[TrainingArguments, LoadedModel]:
    args = TrainingArguments(**options)
    return args, open_model(args.model or "demo", device, args.base_dtype)


def greedy(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    adapter: str | None = None,
    on_logits: OnLogits | None = None,
) -> list[Generation]:
    """Continues token ids. on_logits: called with the logits from which each token was chosen."""
    capacity = min(max(map(len, prompts)) + new_tokens, model.config.max_position_embeddings)
    slots = [0 if adapter else None] * len(prompts)
    with (
        on_device(model, [adapter] if adapter else []) as adapters,
        Generator(model, adapters, capacity, min(BATCH, len(prompts))) as generator,
    ):

        def on_token(sequence: int, token: int) -> None:
            if on_logits:
                on_logits(sequence, generator.state.read_logits(model.device)[sequence])

        stop_ids = model.tokenizer.stop_ids if model.tokenizer else ()
        return generator.generate(prompts, slots, new_tokens, stop_ids=stop_ids, on_token=on_token)


def prompt_of_row(row: Row) -> list[int]:
    """The tokens before the first that is trained, or half of a row that is trained on from its start."""
    trained = np.flatnonzero(row.labels != -100)
    first = int(trained[0]) if trained.size else 0
    return row.input_ids[: first or max(1, len(row.input_ids) // 2)].tolist()


def prompt_of(request: Conversation, tokenizer: Tokenizer, template_kwargs: dict[str, Any]) -> list[int]:
    """Token ids that ask for the turn after a request's messages, as in training: a row's own kwargs take priority."""
    kwargs = {**template_kwargs, **request.template_kwargs}
    return tokenizer.encode(tokenizer.render(request.messages, request.tools, True, kwargs))
