"""A quantised model as a source of plain values, so that it can be merged, exported or quantised in another scheme."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from wgpu_lora.formats.packed_checkpoint import PackedCheckpoint
from wgpu_lora.models.loaded_model import LoadedModel, declare_decoder
from wgpu_lora.weights.base import WeightSource
from wgpu_lora.weights.base_formats import packed_form


class DecodedCheckpoint(WeightSource):
    """A checkpoint whose packed matrices are read as float32, decoded on the host one at a time."""

    def __init__(self, checkpoint: PackedCheckpoint):
        checkpoint.check_digests()
        self.source = checkpoint
        self._last: tuple[str, np.ndarray] | None = None  # matrices are read in pieces

    def names(self) -> list[str]:
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        packed = self.source.packed(name)
        return packed.shape if packed else self.source.shape(name)

    def dtype(self, name: str) -> str:
        return "F32" if self.source.packed(name) else self.source.dtype(name)

    def read_raw(self, name: str, row_start: int = 0, row_stop: int | None = None) -> np.ndarray:
        values = self._values(name)
        return self.source.read_raw(name, row_start, row_stop) if values is None else values[row_start:row_stop]

    def read_f32(self, name: str, row_start: int = 0, row_stop: int | None = None) -> np.ndarray:
        values = self._values(name)
        return self.source.read_f32(name, row_start, row_stop) if values is None else values[row_start:row_stop]

    def digest(self) -> str:
        return self.source.digest()

    def _values(self, name: str) -> np.ndarray | None:
        if self._last and self._last[0] == name:
            return self._last[1]
        packed = self.source.packed(name)
        if packed is None:
            return None
        self._last = name, packed_form(packed.format).decode(packed)
        return self._last[1]


def decoded(model: LoadedModel, base_dtype: str) -> LoadedModel:
    """A model whose linear layers are stored in a base format, to be quantised in another one while it is loaded."""
    assert isinstance(model.checkpoint, PackedCheckpoint)
    config, source = replace(model.config, packed=None), DecodedCheckpoint(model.checkpoint)
    decoder = declare_decoder(config, source, base_dtype, model.device)
    return replace(model, config=config, checkpoint=source, decoder=decoder, weights_loaded=False)
