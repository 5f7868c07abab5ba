"""Base weights and configurations that have changed, or are not finite, are never trained on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.training import model_dir
from test_resume import options, train

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded_model import open_model


def base_of(tmp_path: Path, change: Callable[[dict[str, np.ndarray]], None]) -> Path:
    """A copy of the model with other weights, in the same order and of the same size."""
    target = tmp_path / "base"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(model_dir("qwen2"), target)
    tensors = dict(load_file(target / "model.safetensors"))
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


MIDDLE = "model.layers.1.mlp.up_proj.weight"


def test_a_base_that_has_changed_is_refused(device: Device, tmp_path: Path) -> None:
    """Also if only the middle of a shard has changed, which only its values show."""
    for base_dtype in ("nf4", "f32"):
        base = base_of(tmp_path, lambda tensors: None)
        opts = options(tmp_path, base_dtype, model=str(base), base_dtype=base_dtype, max_steps=2)
        train(device, opts)
        path = base / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(UserError, match=f"The weights of {base} have changed since the run in"):
            train(device, {**opts, "resume": True})


@pytest.mark.parametrize(
    "change",
    [{"rms_norm_eps": 1e-3}, {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
     {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention"] * 3}],
    ids=["eps", "rope", "window"],
)  # fmt: skip
def test_a_config_that_has_changed_is_refused(device: Device, tmp_path: Path, change: dict[str, Any]) -> None:
    base = base_of(tmp_path, lambda tensors: None)
    opts = options(tmp_path, model=str(base), max_steps=1)
    train(device, opts)
    config = base / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(UserError, match=f"The configuration of {base} has changed since the run in"):
        train(device, {**opts, "resume": True})


@pytest.mark.parametrize("base_dtype", ["nf4", "bf16", "f16", "f32"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_base_that_is_not_finite_is_refused_by_name(
    device: Device, tmp_path: Path, base_dtype: str, value: float
) -> None:
    for name in (MIDDLE, "model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"):

        def poison(tensors: dict[str, np.ndarray], name: str = name) -> None:
            values = tensors[name].copy()
            values.reshape(-1)[values.size // 2] = value
            tensors[name] = values

        base = base_of(tmp_path, poison)
        allocated = device.allocated
        with pytest.raises(UserError, match=f"^{name} holds values that are NaN or infinite"):
            open_model(str(base), device, base_dtype).load_weights()
        assert device.allocated == allocated
