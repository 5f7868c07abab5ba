"""Reads and writes models whose linear layers are stored in bitsandbytes' NF4.

`X.weight` is uint8 with two codes per byte, the first in the high nibble. It comes with `X.weight.absmax`,
`X.weight.quant_map` and, with double quantisation, `X.weight.nested_absmax` and `X.weight.nested_quant_map`. The
rest of bitsandbytes' QuantState is JSON in a uint8 tensor, `X.weight.quant_state.bitsandbytes__nf4`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import partial
from math import prod
from typing import Any

import numpy as np

from wgpu_lora.bounded import parse_object
from wgpu_lora.errors import UserError
from wgpu_lora.formats.checkpoint import Checkpoint
from wgpu_lora.weights.base import Packed
from wgpu_lora.weights.nf4 import PARTS
from wgpu_lora.weights.nf4_codes import BLOCK, DYNAMIC_CODE, NESTED_BLOCK, NF4_CODE

F32_MAX = float(np.finfo(np.float32).max)
STATE = ".quant_state.bitsandbytes__nf4"
SUFFIXES = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", STATE)
KIND = "nf4"  # bitsandbytes' name and ours; its fp4 is not supported
# quantization_config in config.json, for transformers.
QUANTIZATION_CONFIG: dict[str, Any] = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": KIND,
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "llm_int8_skip_modules": ["lm_head"],
}


class PackedCheckpoint(Checkpoint):
    """A checkpoint with packed linear layers. `names` lists whole parameters, not their parts."""

    def names(self) -> list[str]:
        return [name for name in super().names() if not name.endswith(SUFFIXES)]

    def dtype(self, name: str) -> str:
        return "NF4" if f"{name}{STATE}" in self else super().dtype(name)

    def packed(self, name: str) -> Packed | None:
        """The tensor with the parts described in `weights.nf4`, or None if it is not packed."""
        if f"{name}{STATE}" not in self:
            return None
        shape = tuple(self._state(name)["shape"])
        return Packed(KIND, shape, PARTS if self._nested(name) else PARTS[:2], partial(self._read_packed, name))

    def _nested(self, name: str) -> bool:
        """Whether a packed tensor is double-quantised."""
        return f"{name}.nested_absmax" in self

    def _read_packed(self, name: str) -> tuple[np.ndarray, ...]:
        codes = self._stored(name, "U8")
        if not self._nested(name):
            return codes, self._stored(f"{name}.absmax", "F32")
        nested = np.append(self._stored(f"{name}.nested_absmax", "F32"), np.float32(self._state(name)["nested_offset"]))
        return codes, self._stored(f"{name}.absmax", "U8"), nested.astype(np.float32)

    def check_against(self, shapes: Mapping[str, tuple[int, ...]], matrices: Collection[str] | None = None) -> None:
        """Raises UserError unless all parameters exist, and the packed ones are in the supported form of NF4.

        matrices: names of those that may be packed; by default, any.
        """
        for name, shape in shapes.items():
            if f"{name}{STATE}" not in self:
                self.check_parameter(name, shape)
                continue
            if matrices is not None and name not in matrices:
                raise UserError(f"{name} in {self.directory} is packed, but is not a linear layer: use another model.")
            self._check_packed(name, shape)
        self.check_unknown(shapes)

    def _check_packed(self, name: str, shape: tuple[int, ...]) -> None:
        state, nested = self._state(name), self._nested(name)
        size, where = prod(shape), f"{name} in {self.directory}"
        wanted = {"quant_type": KIND, "blocksize": BLOCK, "shape": list(shape)}
        if nested:
            wanted |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}
        for key, value in wanted.items():
            if state.get(key) != value:
                raise UserError(f"{where} is packed with {key} {state.get(key)!r}, not {value!r}: use another model.")
        blocks = -(-size // BLOCK)
        sizes = {"": -(-size // 2), ".absmax": blocks, ".quant_map": 16}
        if nested:
            sizes |= {".nested_absmax": -(-blocks // NESTED_BLOCK), ".nested_quant_map": 256}
            offset = state.get("nested_offset")
            if not isinstance(offset, float | int) or not abs(offset) < F32_MAX:
                raise UserError(f"{where} has no nested_offset: copy the model again.")
        for part, count in sizes.items():
            if prod(self.shape(name + part)) != count:
                raise UserError(
                    f"{name + part} in {self.directory} should have {count:,} values: copy the model again."
                )
        maps = {".quant_map": NF4_CODE} | ({".nested_quant_map": DYNAMIC_CODE} if nested else {})
        for part, code in maps.items():
            if np.abs(self._stored(name + part, "F32") - code).max() > 1e-6:
                raise UserError(f"{where} has a codebook ({part[1:]}) that is not supported: use another model.")

    def _state(self, name: str) -> dict[str, Any]:
        return parse_object(self._stored(name + STATE, "U8").tobytes(), f"{name}{STATE} in {self.directory}")

    def _stored(self, name: str, dtype: str) -> np.ndarray:
        if Checkpoint.dtype(self, name) != dtype:
            raise UserError(f"{name} in {self.directory} is not of type {dtype}: copy the model again.")
        return self.read_stored(name).reshape(-1).view({"U8": np.uint8, "F32": np.float32}[dtype])


def stored_parts(name: str, packed: Packed, dtype: str) -> dict[str, np.ndarray]:
    """The stored tensors of a double-quantised matrix, by name. dtype: the original one, such as bfloat16."""
    codes, absmax, nested = packed.read()
    state: Mapping[str, Any] = {
        "quant_type": packed.format,
        "blocksize": BLOCK,
        "dtype": dtype,
        "shape": list(packed.shape),
        "nested_blocksize": NESTED_BLOCK,
        "nested_dtype": "float32",
        "nested_offset": float(nested[-1]),
    }
    return {
        name: codes.reshape(-1, 1),
        f"{name}.absmax": absmax,
        f"{name}.nested_absmax": nested[:-1],
        f"{name}.nested_quant_map": DYNAMIC_CODE,
        f"{name}.quant_map": NF4_CODE,
        f"{name}{STATE}": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }
