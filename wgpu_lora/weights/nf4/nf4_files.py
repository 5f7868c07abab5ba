"""How bitsandbytes and transformers store NF4 in a checkpoint.

`X.weight` is uint8 with two codes per byte, the first in the high nibble. It comes with `X.weight.absmax`,
`X.weight.quant_map` and, with double quantisation, `X.weight.nested_absmax` and `X.weight.nested_quant_map`. The
rest of bitsandbytes' QuantState is JSON in a uint8 tensor, `X.weight.quant_state.bitsandbytes__nf4`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.files.json_files import parse_object
from wgpu_lora.weights.base import Packed, StoredTensors
from wgpu_lora.weights.nf4.nf4_reference import BLOCK, DYNAMIC_CODE, NAME, NESTED_BLOCK, NF4_CODE, PARTS, decode_parts

F32_MAX = float(np.finfo(np.float32).max)


class BitsAndBytesNF4:
    """NF4's packed form. bitsandbytes' fp4 is not supported."""

    title = "bitsandbytes' NF4"
    marker = ".quant_state.bitsandbytes__nf4"
    suffixes = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", marker)
    config: Mapping[str, Any] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": NAME,
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": ["lm_head"],
    }

    def quantization_config(self, base_format: str, skip_modules: Sequence[str] = ()) -> Mapping[str, Any]:
        return {**self.config, "llm_int8_skip_modules": [*self.config["llm_int8_skip_modules"], *skip_modules]}

    def base_format(self, quantization_config: Mapping[str, Any]) -> str | None:
        stated = [quantization_config.get(key) for key in ("quant_method", "load_in_4bit", "bnb_4bit_quant_type")]
        return NAME if stated == ["bitsandbytes", True, NAME] and stated[1] is True else None

    def is_packed(self, tensors: StoredTensors, name: str) -> bool:
        return name + self.marker in tensors

    def check(self, tensors: StoredTensors, name: str, shape: tuple[int, ...], base_format: str) -> None:
        state, nested = self._state(tensors, name), _is_nested(tensors, name)
        size, where = prod(shape), f"{name} in {tensors.directory}"
        expected = {"quant_type": NAME, "blocksize": BLOCK, "shape": list(shape)}
        if nested:
            expected |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}
        for key, value in expected.items():
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
            if prod(tensors.shape(name + part)) != count:
                raise UserError(
                    f"{name + part} in {tensors.directory} should have {count:,} values: copy the model again."
                )
        maps = {".quant_map": NF4_CODE} | ({".nested_quant_map": DYNAMIC_CODE} if nested else {})
        for part, code in maps.items():
            if np.abs(tensors.array(name + part, "F32") - code).max() > 1e-6:
                raise UserError(f"{where} has a codebook ({part[1:]}) that is not supported: use another model.")

    def read(self, tensors: StoredTensors, name: str, shape: tuple[int, ...]) -> Packed:
        parts = PARTS if _is_nested(tensors, name) else PARTS[:2]
        return Packed(NAME, (shape[0], shape[1]), parts, partial(self._arrays, tensors, name))

    def _arrays(self, tensors: StoredTensors, name: str) -> tuple[np.ndarray, ...]:
        codes = tensors.array(name, "U8")
        if not _is_nested(tensors, name):
            return codes, tensors.array(f"{name}.absmax", "F32")
        offset = np.float32(self._state(tensors, name)["nested_offset"])
        nested = np.append(tensors.array(f"{name}.nested_absmax", "F32"), offset)
        return codes, tensors.array(f"{name}.absmax", "U8"), nested.astype(np.float32)

    def _state(self, tensors: StoredTensors, name: str) -> dict[str, Any]:
        document = tensors.array(name + self.marker, "U8").tobytes()
        return parse_object(document, f"{name}{self.marker} in {tensors.directory}")

    def decode(self, packed: Packed) -> np.ndarray:
        return decode_parts(packed.read(), packed.shape)

    def tensors(self, name: str, packed: Packed, dtype: str) -> dict[str, np.ndarray]:
        codes, absmax, nested = packed.read()
        state: Mapping[str, Any] = {
            "quant_type": NAME,
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
            f"{name}{self.marker}": np.frombuffer(json.dumps(state).encode(), np.uint8),
        }


def _is_nested(tensors: StoredTensors, name: str) -> bool:
    """Whether a packed matrix is double-quantised."""
    return f"{name}.nested_absmax" in tensors
