"""Continues held-out prompts greedily with a model in NF4, keeping the logits on the way."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgpu_lora.data import Row
from wgpu_lora.infer import Generator
from wgpu_lora.models.loaded import open_model
from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.train.finetune import read_run
from wgpu_lora.weights.registry import DEFAULT_FORMAT
from wgpu_lora.worker.child import Port

PROMPTS, NEW_TOKENS = 4, 48
KEPT = 16  # positions of each answer whose logits are kept whole


def run(port: Port, *, options: dict[str, Any], device: int, arrays: str) -> dict[str, Any]:
    """Logits go to the .npz file `arrays`, one [positions, vocab] for each prompt; the rest is returned."""
    args = TrainingArguments(**options)
    model = open_model(args.model or "demo", device, args.base_dtype)
    heldout = read_run(args, model).heldout
    assert heldout, "a proof's recipe has held-out data"
    prompts = [prompt_of(row) for row in heldout.rows[:PROMPTS]]
    capacity = min(max(map(len, prompts)) + NEW_TOKENS, model.config.max_position_embeddings)
    logits: list[list[np.ndarray]] = [[] for _ in prompts]
    gaps: list[list[float]] = [[] for _ in prompts]
    with Generator(model, None, capacity, len(prompts)) as generator:

        def keep(sequence: int, token: int) -> None:
            row = generator.state.read_logits(model.device)[sequence]
            second, first = np.partition(row, -2)[-2:]
            gaps[sequence].append(float(first - second))
            if len(logits[sequence]) < KEPT:
                logits[sequence].append(row.copy())

        stop_ids = model.tokenizer.stop_ids if model.tokenizer else ()
        found = generator.generate(prompts, max_new_tokens=NEW_TOKENS, stop_ids=stop_ids, on_token=keep)
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


def prompt_of(row: Row) -> list[int]:
    """What comes before the first token that is learnt; half of a row that is learnt whole."""
    learnt = np.flatnonzero(row.labels != -100)
    first = int(learnt[0]) if learnt.size else 0
    return row.input_ids[: first or max(1, len(row.input_ids) // 2)].tolist()
