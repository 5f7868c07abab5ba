"""The shape that bricks are benchmarked at: this project's tiny one cut to a layer, or what the environment names."""

from __future__ import annotations

import os

import pytest

from wgpu_lora.bench.brick import Context
from wgpu_lora.gpu.device import Device

SHAPE, LAYERS, TOKENS = "WGPU_LORA_BENCH_SHAPE", "WGPU_LORA_BENCH_LAYERS", "WGPU_LORA_BENCH_TOKENS"


@pytest.fixture(scope="session")
def context() -> Context:
    shape = os.environ.get(SHAPE)
    layers = os.environ.get(LAYERS) or (None if shape else 1)
    tokens = int(os.environ.get(TOKENS) or (512 if shape else 128))
    return Context.of(Device(), shape or "tiny-qwen3", None, int(layers) if layers else None, tokens=tokens)
