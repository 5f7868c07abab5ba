"""Reads models whose linear layers are stored in a base format."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.formats.safetensors_checkpoint import PLAIN, Checkpoint, TensorNames
from wgpu_lora.weights.base import Packed
from wgpu_lora.weights.base_formats import packed_form

# safetensors' notation -> NumPy, of the tensors of packed matrices
ARRAYS = {
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U32": np.dtype(np.uint32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
}


class PackedCheckpoint(Checkpoint):
    """A checkpoint with packed linear layers. `names` lists whole parameters, not their parts.

    base_format: the registered format that they are stored in.
    """

    def __init__(self, directory: str | Path, base_format: str, naming: TensorNames = PLAIN):
        super().__init__(directory, naming)
        self._format, self._form = base_format, packed_form(base_format)
        self._shapes: Mapping[str, tuple[int, ...]] = {}

    def names(self) -> list[str]:
        return [name for name in super().names() if not name.endswith(self._form.suffixes)]

    def dtype(self, name: str) -> str:
        return self._format.upper() if self._is_packed(name) else super().dtype(name)

    def packed(self, name: str) -> Packed | None:
        return self._form.read(self, name, self._shapes[name]) if self._is_packed(name) else None

    def base_format(self, name: str) -> str | None:
        packed = self.packed(name)
        return packed.format if packed else super().base_format(name)

    def stored_dtype(self, name: str) -> str:
        """The dtype of a tensor, in safetensors' notation, as it is stored."""
        return super().dtype(name)

    def array(self, name: str, dtype: str) -> np.ndarray:
        """A tensor's values, flattened. Raises UserError unless it has this dtype, one of ARRAYS."""
        if super().dtype(name) != dtype:
            raise UserError(f"{name} in {self.directory} is not of type {dtype}: copy the model again.")
        return self.read_stored(name).reshape(-1).view(ARRAYS[dtype])

    def check_against(self, shapes: Mapping[str, tuple[int, ...]], matrices: Collection[str] | None = None) -> None:
        """Raises UserError unless all parameters exist, and the packed ones are in a supported form.

        matrices: names of those that may be packed; by default, any.
        """
        self._shapes = shapes
        for name, shape in shapes.items():
            if not self._is_packed(name):
                self.check_parameter(name, shape)
                continue
            if matrices is not None and name not in matrices:
                raise UserError(f"{name} in {self.directory} is packed, but is not a linear layer: use another model.")
            self._form.check(self, name, shape, self._format)
        self.check_unknown(shapes)

    def _is_packed(self, name: str) -> bool:
        return self._form.is_packed(self, name)
