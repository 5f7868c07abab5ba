"""64 tokens of transformers' greedy generation, for every architecture: with a cache, in a batch and alone."""

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.models import ARCHITECTURES, FIXTURES, golden, load

from wgpu_lora.gpu.device import Device
from wgpu_lora.infer import Generator
from wgpu_lora.infer.generator import reusable_prefix


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_are_those_of_transformers(device: Device, architecture: str) -> None:
    stored = load_file(FIXTURES / "golden" / "generation.safetensors")
    expected = stored[f"{architecture}.tokens"].tolist()
    prompts = [golden(architecture)["input_ids"][1, :6].tolist(), stored[f"{architecture}.prompt"].tolist()]
    with Generator(load(architecture, device), None, capacity=72, batch=2, buckets=(4,)) as generator:
        together = generator.generate(prompts, max_new_tokens=64)[1]
        (alone,) = generator.generate(prompts[1:], max_new_tokens=64)
    assert together.token_ids == alone.token_ids == expected


def test_a_cache_is_used_on_one_side_of_a_switch_alone() -> None:
    """What it holds, a prompt that goes on from there, and how much of it is of use; with a switch at 4 tokens."""
    for held, prompt, known in ((3, 4, 3), (2, 3, 2), (3, 5, 0), (4, 5, 0), (4, 4, 0), (5, 4, 0), (5, 6, 5), (6, 9, 6)):
        ids = np.arange(9)
        assert reusable_prefix(ids[:held], ids[:prompt], True, 4) == known, (held, prompt)
        assert reusable_prefix(ids[:held], ids[:prompt], True, None) == min(held, prompt - 1)
