"""64 tokens of transformers' greedy generation, for every architecture: with a cache, in a batch and alone."""

import pytest
from safetensors.numpy import load_file
from support.models import ARCHITECTURES, FIXTURES, golden, load

from wgpu_lora.gpu.device import Device
from wgpu_lora.infer import Generator


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_are_those_of_transformers(device: Device, architecture: str) -> None:
    stored = load_file(FIXTURES / "golden" / "generation.safetensors")
    expected = stored[f"{architecture}.tokens"].tolist()
    prompts = [golden(architecture)["input_ids"][1, :6].tolist(), stored[f"{architecture}.prompt"].tolist()]
    with Generator(load(architecture, device), None, capacity=72, batch=2, buckets=(4,)) as generator:
        together = generator.generate(prompts, max_new_tokens=64)[1]
        (alone,) = generator.generate(prompts[1:], max_new_tokens=64)
    assert together.token_ids == alone.token_ids == expected
