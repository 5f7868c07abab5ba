"""SmolLM2, loaded once for all tests in each base dtype of BASES."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.real_models import smollm2, trained_adapter

import wgpu_lora
from wgpu_lora.gpu.device import Device

BASES = ("f32",)  # of which each is exact


@pytest.fixture(scope="session", params=BASES)
def model(request: pytest.FixtureRequest, device: Device) -> Iterator[wgpu_lora.Model]:
    opened = wgpu_lora.load(smollm2(), device=device, base_dtype=request.param)
    opened.load_weights()
    yield opened
    opened.unload()


@pytest.fixture(scope="session")
def trained(model: wgpu_lora.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_adapter(model, tmp_path_factory.mktemp("trained"))
