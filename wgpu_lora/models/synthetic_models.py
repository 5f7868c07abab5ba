"""Models of a given shape with random weights, for benchmarks."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.models.decoder import Decoder
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.models.model_config import BIAS, ModelConfig
from wgpu_lora.weights.base import WeightSource
from wgpu_lora.weights.base_formats import AUTO, DEFAULT_FORMAT
from wgpu_lora.weights.gguf.gguf_formats import FORMATS, random_blocks

POOL = 1 << 20  # random values drawn once; every tensor reads them from another offset


class SyntheticCheckpoint(WeightSource):
    """A `WeightSource` of bf16 matrices of standard deviation 0.02, norms by 1 and biases of 0."""

    def __init__(self, config: ModelConfig):
        self._shapes = config.parameter_shapes()
        self._zero = {name for name, item in config.parameters.items() if item.kind == BIAS or item.offset}
        values = 0.02 * np.random.default_rng(0).standard_normal(POOL, np.float32)
        self._pool = (values.view(np.uint32) >> 16).astype(np.uint16)

    def names(self) -> list[str]:
        return sorted(self._shapes)

    def dtype(self, name: str) -> str:
        return "BF16"

    def read_raw(self, name: str, row_start: int = 0, row_stop: int | None = None) -> np.ndarray:
        """Rows [row_start, row_stop) as bf16 bits, the same in every call."""
        shape = self._shapes[name]
        rows = (shape[0] if row_stop is None else row_stop) - row_start
        if len(shape) == 1:
            return np.full(rows, 0 if name in self._zero else 0x3F80, np.uint16)
        cols = int(np.prod(shape[1:]))
        start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") + row_start * cols
        return np.resize(np.roll(self._pool, -(start % POOL)), (rows, *shape[1:]))

    def read_f32(self, name: str, row_start: int = 0, row_stop: int | None = None) -> np.ndarray:
        return (self.read_raw(name, row_start, row_stop).astype(np.uint32) << 16).view(np.float32)

    def read_blocks(self, name: str, base_format: str, row_start: int, row_stop: int) -> np.ndarray:
        """Random blocks of a type of GGUF files, uint8 [rows, bytes]."""
        (size_in,), rng = self._shapes[name][1:], np.random.default_rng([0, row_start])
        return random_blocks(FORMATS[base_format], row_stop - row_start, size_in, rng, 0.02)

    def digest(self) -> str:
        return hashlib.sha256(f"synthetic 0 {sorted(self._shapes.items())}".encode()).hexdigest()


def synthetic_model(
    config: ModelConfig, device: Device, base_dtype: str = DEFAULT_FORMAT, name: str = "synthetic"
) -> LoadedModel:
    """A model without a tokenizer. Nothing is allocated until its weights are loaded."""
    base_dtype = DEFAULT_FORMAT if base_dtype == AUTO else base_dtype
    decoder = Decoder.declare(config, base_dtype, "bf16", device.max_binding)
    return LoadedModel(name, Path(name), config, SyntheticCheckpoint(config), None, device, decoder)
