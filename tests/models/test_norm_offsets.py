"""Norms by (1 + w): the device and GGUF hold the sums, checkpoints w (`Parameter.offset`)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import MODELS
from support.gguf_models import read, small, values
from support.models import full_logits, golden, golden_rows, save_golden_adapter

from wgpu_lora.export.adapter_merge import merge_adapter
from wgpu_lora.export.gguf_export import export_model
from wgpu_lora.formats.gguf.gguf_header import read_header
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.architectures import ARCHITECTURES, load_config
from wgpu_lora.models.architectures.qwen3 import Qwen3
from wgpu_lora.models.batch_inputs import Segment
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.models.model_config import VECTOR, Parameter
from wgpu_lora.models.model_files import open_weights


class Shifted(Qwen3):
    NORM_OFFSET = 1.0

    def layer(self, index: int) -> dict[str, Parameter]:
        items = super().layer(index)
        return {name: replace(item, offset=1.0 if item.kind == VECTOR else 0.0) for name, item in items.items()}


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    ARCHITECTURES["shifted"] = Shifted
    yield
    del ARCHITECTURES["shifted"]


def shifted(source: Path, directory: Path) -> Path:
    """The model with w instead of 1 + w."""
    shutil.copytree(source, directory)
    tensors = load_file(directory / "model.safetensors")
    moved = {n: v.astype(np.float32) - 1 if n.endswith("norm.weight") else v for n, v in tensors.items()}
    save_file(moved, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text()) | {"model_type": "shifted"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_logits_are_those_of_the_sums(device: Device, tmp_path: Path) -> None:
    segments = [Segment(ids) for ids in golden_rows(golden("qwen3"), "input_ids")]
    model = open_model(str(shifted(MODELS / "qwen3", tmp_path / "model")), device, "f32")
    model.load_weights()
    for have, want in zip(full_logits(model, segments), golden_rows(golden("qwen3"), "logits.f32"), strict=True):
        np.testing.assert_allclose(have, want, rtol=0, atol=1e-4 * np.abs(want).max())
    merge_adapter(tmp_path / "model", save_golden_adapter("qwen3", tmp_path / "adapter"), tmp_path / "merged", "f32")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "merged"))
    norms = [name for name in before if name.endswith("norm.weight")]
    assert len(norms) == 9
    for name in norms:
        np.testing.assert_array_equal(after[name], before[name])


def test_gguf_holds_the_sums(tmp_path: Path) -> None:
    source = small(tmp_path / "qwen3", "qwen3")
    model = shifted(source, tmp_path / "model")
    export_model(model, tmp_path / "model.gguf", "f16")
    of_source, (_, written) = load_file(source / "model.safetensors"), read(tmp_path / "model.gguf")
    for name, own in (("output_norm", "model.norm"), ("blk.1.attn_q_norm", "model.layers.1.self_attn.q_norm")):
        np.testing.assert_array_equal(values(written[f"{name}.weight"]), of_source[f"{own}.weight"])
    checkpoint, own = open_weights(read_header(tmp_path / "model.gguf"), load_config(model)), "model.norm.weight"
    expected = load_file(model / "model.safetensors")[own]
    np.testing.assert_array_equal(checkpoint.read_f32(own, 3, 9), expected[3:9])
    np.testing.assert_array_equal(checkpoint.read_raw(own).view(np.float32), expected)
    assert checkpoint.dtype(own) == "F32"
