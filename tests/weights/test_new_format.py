"""A base format of a test's own: chosen, planned, loaded, computed with, saved, and measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from support.models import full_logits, golden, golden_rows, relative_error
from support.training.training import golden_arguments, model_dir

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.tensor import Storage, Tensor
from wgpu_lora.models.batch_inputs import Segment
from wgpu_lora.models.config_fields import packed
from wgpu_lora.models.export.adapter_merge import MergedModel
from wgpu_lora.models.export.quantized_model import write_packed
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.run.training_log import LOG, read_log
from wgpu_lora.weights.base import Loading, MatrixSource, Packed, Shared, StoredTensors, Weight
from wgpu_lora.weights.base_formats import BASE_FORMATS
from wgpu_lora.weights.dense import DenseWeight


@dataclass(frozen=True)
class TwinWeight(Weight):
    """W = high + low, both bf16: 16 bits of a float32's 24."""

    out_features: int
    in_features: int
    high: DenseWeight
    low: DenseWeight
    format = "twin"

    def forward(self, rec: Recorder, x: Tensor, y: Tensor, bias: Tensor | None, accumulate: bool) -> None:
        self.high.forward(rec, x, y, bias, accumulate)
        self.low.forward(rec, x, y, None, True)

    def backward(self, rec: Recorder, dy: Tensor, dx: Tensor, accumulate: bool) -> None:
        self.high.backward(rec, dy, dx, accumulate)
        self.low.backward(rec, dy, dx, True)

    def storages(self) -> list[Storage]:
        return [*self.high.storages(), *self.low.storages()]

    def load(self, loading: Loading, source: MatrixSource, name: str) -> None:
        packed = source.packed(name)
        parts = packed.read() if packed else split(source.read_f32(name))
        for storage, part in zip(self.storages(), parts, strict=True):
            loading.device.write(storage.buffer, part)

    def values(self, device: Device) -> np.ndarray:
        return self.high.values(device) + self.low.values(device)

    def packed(self, device: Device) -> Packed:
        parts = (self.high.values(device).astype(bfloat16), self.low.values(device).astype(bfloat16))
        return Packed(self.format, (self.out_features, self.in_features), ("high", "low"), lambda: parts)

    def synthetic(self, rng: np.random.Generator) -> Iterator[tuple[Tensor, np.ndarray]]:
        yield from self.high.synthetic(rng)
        yield from self.low.synthetic(rng)


def split(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    high = w.astype(bfloat16)
    return high, (w - high.astype(np.float32)).astype(bfloat16)


class TwinFiles:
    """In checkpoints: high has the matrix's name, and low is beside it."""

    title, suffixes = "the twins", (".low",)

    def quantization_config(self, base_format: str, skip_modules: Sequence[str] = ()) -> dict[str, str]:
        return {"quant_method": base_format}

    def base_format(self, quantization_config: Mapping[str, Any]) -> str | None:
        return "twin" if quantization_config.get("quant_method") == "twin" else None

    def is_packed(self, tensors: StoredTensors, name: str) -> bool:
        return f"{name}.low" in tensors

    def check(self, tensors: StoredTensors, name: str, shape: tuple[int, ...], base_format: str) -> None:
        if tensors.shape(name) != shape or tensors.shape(f"{name}.low") != shape:
            raise UserError(f"{name} in {tensors.directory} are not twins: copy the model again.")

    def read(self, tensors: StoredTensors, name: str, shape: tuple[int, ...]) -> Packed:
        names = name, f"{name}.low"
        return Packed(
            "twin", shape, ("high", "low"), lambda: tuple(tensors.array(n, "BF16").reshape(shape) for n in names)
        )

    def decode(self, packed: Packed) -> np.ndarray:
        high, low = packed.read()
        return high.astype(np.float32) + low.astype(np.float32)

    def tensors(self, name: str, packed: Packed, dtype: str) -> dict[str, np.ndarray]:
        return dict(zip((name, f"{name}.low"), packed.read(), strict=True))


class Twin:
    name, bits, packed_form = "twin", 32.0, TwinFiles()

    def declare(self, shape: tuple[int, int], name: str, shared: Shared, packed: Packed | None = None) -> TwinWeight:
        parts = (DenseWeight.declare(shape, "bf16", f"{name}.{part}", shared.max_binding) for part in ("high", "low"))
        return TwinWeight(*shape, *parts)

    def round_trip(self, w: np.ndarray) -> np.ndarray:
        high, low = split(w)
        return high.astype(np.float32) + low.astype(np.float32)


TWIN = Twin()
K_PROJ = "model.layers.0.self_attn.k_proj.weight"


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BASE_FORMATS, "twin", f"{__name__}:TWIN")


def logits(model: LoadedModel) -> list[np.ndarray]:
    return full_logits(model, [Segment(ids) for ids in golden_rows(golden("llama"), "input_ids")])


def test_it_is_loaded_and_computed_with(device: Device) -> None:
    """The golden llama is f32, of which bf16 keeps too little to pass, and twin enough."""
    model, dense = (open_model(str(model_dir("llama")), device, base) for base in ("twin", "f32"))
    assert model.bytes_to_load() == dense.bytes_to_load()
    model.load_weights()
    dense.load_weights()
    weight = model.decoder.layers[0].linears["self_attn.k_proj"].weight
    values = model.checkpoint.read_f32(K_PROJ)
    np.testing.assert_array_equal(weight.values(device), TWIN.round_trip(values))
    np.testing.assert_array_equal(weight.packed(device).read(), split(values))
    assert max(map(relative_error, logits(model), logits(dense))) < 1e-4


def test_it_is_saved_and_loaded_as_it_was_saved(device: Device, tmp_path: Path) -> None:
    model, saved = open_model(str(model_dir("llama")), device, "twin"), tmp_path / "saved"
    write_packed(model, saved, max_shard_bytes=30_000)
    assert json.loads((saved / "config.json").read_text())["quantization_config"] == {"quant_method": "twin"}
    again = open_model(str(saved), device)
    assert (again.config.packed, again.decoder.base_dtype) == ("twin", "twin")
    assert again.checkpoint.names() == sorted(model.config.parameter_shapes())
    np.testing.assert_array_equal(again.checkpoint.packed(K_PROJ).read(), split(model.checkpoint.read_f32(K_PROJ)))
    decoded = np.concatenate(list(MergedModel(saved).pieces(K_PROJ)))
    np.testing.assert_array_equal(decoded, TWIN.round_trip(model.checkpoint.read_f32(K_PROJ)))
    again.load_weights()
    model.load_weights()
    for have, want in zip(logits(again), logits(model), strict=True):
        np.testing.assert_array_equal(have, want)
    with pytest.raises(UserError, match="are stored in TWIN"):
        open_model(str(saved), device, "f32")
    with pytest.raises(UserError, match="is not quantised on loading"):
        write_packed(again, tmp_path / "twice")


CHOICES = "nf4, bf16, f16, f32, lut2, lut3, lut4, int8, gguf, twin"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "gptq"},
            "'gptq', which is not supported: use bitsandbytes' NF4 or wgpu-lora's low-bit codes or the twins, or",
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_8bit": True},
            r"are stored in 8 bits \(LLM.int8\), which is not supported",
        ),
    ],
)
def test_what_is_not_read_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        packed({"quantization_config": config}, "config.json")


def test_it_is_planned_and_trained_on(device: Device, tmp_path: Path) -> None:
    args = golden_arguments(tmp_path, "llama", max_steps=2, tune=False)
    planned, losses = [], []
    for base in ("twin", "f32"):
        job = prepare_job(replace(args, base_dtype=base, output=str(tmp_path / base)))
        planned.append(job.session.memory().groups["base"])
        assert job.train().options.base_dtype == base
        losses.append([line["loss"] for line in read_log(tmp_path / base / LOG)])
    assert planned[0] == planned[1]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert losses[0] != losses[1]  # it is not the same model


def test_it_is_named_with_the_others(device: Device, tmp_path: Path) -> None:
    packed = CHOICES.replace("bf16, f16, f32, ", "").replace("gguf, ", "")
    message = rf"base_dtype='bf16' cannot be stored packed: choose one of {packed}\."
    with pytest.raises(UserError, match=message):
        write_packed(open_model(str(model_dir("llama")), device, "bf16"), tmp_path / "saved")
    with pytest.raises(UserError, match=rf"base_dtype='zork' is not known: choose one of {CHOICES}\."):
        open_model(str(model_dir("llama")), base_dtype="zork")
