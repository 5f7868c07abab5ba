"""SmolLM2, loaded once in each base dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from support.real_models import BASES, smollm2, trained_adapter

import wgpu_lora
from wgpu_lora.gpu.device import Device

Open = Callable[[str], wgpu_lora.Model]


@pytest.fixture(scope="session")
def opened(device: Device) -> Open:
    @cache
    def load(base_dtype: str) -> wgpu_lora.Model:
        model = wgpu_lora.load(smollm2(), device=device, base_dtype=base_dtype)
        model.load_weights()
        return model

    return load


@pytest.fixture(params=BASES)
def any_model(request: pytest.FixtureRequest, opened: Open) -> wgpu_lora.Model:
    """In every base dtype that is exact."""
    return opened(request.param)


@pytest.fixture(scope="session")
def model(opened: Open) -> wgpu_lora.Model:
    """In the last of them, whose training and answers stand for all."""
    return opened(BASES[-1])


@pytest.fixture(scope="session")
def trained(model: wgpu_lora.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_adapter(model, tmp_path_factory.mktemp("trained"))
