"""Greedy continuations by transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import PreTrainedModel

from golden.models import CONFIGS, load
from golden.training import Arrays

TOKENS = 64
LEAST_MARGIN = 1e-3  # between the two largest logits, so that rounding decides nothing
LEAST_DIFFERENT = 3


def generation(models: Path, golden: Path) -> Arrays:
    """Everything that tests/fixtures/golden/generation.safetensors holds: prompts and their tokens, by architecture."""
    out = {}
    for architecture in CONFIGS:
        model, stored = load(models / architecture), load_file(golden / f"{architecture}.safetensors")
        prompts = (ids[:length] for ids in stored["data_ids"] for length in (2, 3, 4, 5))
        prompt, tokens = next((prompt, found) for prompt in prompts if (found := _continued(model, prompt)) is not None)
        out |= {f"{architecture}.prompt": prompt, f"{architecture}.tokens": tokens}
    return out


def _continued(model: PreTrainedModel, prompt: np.ndarray) -> np.ndarray | None:
    """The tokens; None if rounding might change one, or if they only repeat a few."""
    ids = torch.from_numpy(prompt[None]).long()
    said = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS, eos_token_id=None,
        pad_token_id=0, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    best = torch.stack(said.scores)[:, 0].topk(2).values
    tokens = said.sequences[0, len(prompt) :].numpy().astype(np.int32)
    certain = float((best[:, 0] - best[:, 1]).min()) > LEAST_MARGIN
    return tokens if certain and len(set(tokens.tolist())) >= LEAST_DIFFERENT else None
