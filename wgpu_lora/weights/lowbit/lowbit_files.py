"""How low-bit matrices are stored in a checkpoint.

`X.weight` has the codes: U8 [out, bytes] as `lowbit_layout.pack` packs them or, for 8 bits, I8 [out, in].
`X.weight.table` is [out, 2^bits], for 2 to 4 bits, and `X.weight.scales` is [groups, out]; both are F16 or both F32.
The scheme of a matrix follows from these shapes; it must be that which config.json states:

    "quantization_config": {"quant_method": "wgpu_lora", "base_dtype": "q2a4", "mlp": "lut2", "attention": "lut4"}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.weights.base import Packed, StoredTensors
from wgpu_lora.weights.lowbit.lowbit_layout import (
    GROUPS,
    KINDS,
    ROW,
    Mix,
    Scheme,
    decode,
    row_bytes,
    scale_count,
    scheme_of,
    table_size,
    unpack,
)

METHOD = "wgpu_lora"
TABLE, SCALES = ".table", ".scales"
# Parts of a matrix: "codes", and "table" and "scales" where its scheme has them, "table:f32" and "scales:f32" in f32.
F32 = ":f32"


class LowBitFiles:
    """The packed form of all low-bit formats, and of their mixes."""

    title = "wgpu-lora's low-bit codes"
    suffixes = (TABLE, SCALES)

    def quantization_config(self, base_format: str, skip_modules: Sequence[str] = ()) -> Mapping[str, Any]:
        mix = Mix.of(base_format)
        kinds = {"mlp": mix.mlp.name, "attention": mix.attention.name} if mix else {}
        return {"quant_method": METHOD, "base_dtype": base_format, **kinds}

    def base_format(self, quantization_config: Mapping[str, Any]) -> str | None:
        name = quantization_config.get("base_dtype")
        if quantization_config.get("quant_method") != METHOD or not isinstance(name, str):
            return None
        result = Scheme.of(name) or Mix.of(name)
        kinds = self.quantization_config(result.name) if result else {}
        for kind in ("mlp", "attention"):
            if result and quantization_config.get(kind, kinds.get(kind)) != kinds.get(kind):
                raise UserError(
                    f"quantization_config states base_dtype {name!r}, but {kind} {quantization_config[kind]!r:.40}: "
                    "copy the model again."
                )
        return result.name if result else None

    def is_packed(self, tensors: StoredTensors, name: str) -> bool:
        return name + TABLE in tensors or name + SCALES in tensors

    def check(self, tensors: StoredTensors, name: str, shape: tuple[int, ...], base_format: str) -> None:
        where = f"{name} in {tensors.directory}"
        result, stated = _stored_scheme(tensors, name, shape), scheme_of(base_format, name)
        if result is None or result != _as_stored(stated, shape):
            kind = f"stored as {result.name}" if result else "not stored in any scheme"
            raise UserError(f"{where} is {kind}, but config.json states {stated.name}: copy the model again.")
        out, size_in = shape
        expected = {
            name: (out, row_bytes(size_in, result.bits)),
            name + TABLE: (out, table_size(result.bits)),
            name + SCALES: (scale_count(size_in, result.bits, result.group), out),
        }
        for part in _parts(tensors, name):
            if tensors.shape(part) != expected[part]:
                has, asks = list(tensors.shape(part)), list(expected[part])
                raise UserError(
                    f"{part} in {tensors.directory} has shape {has}, but {result.name} of {size_in:,} inputs asks for "
                    f"{asks}: copy the model again."
                )
        types = [tensors.stored_dtype(part) for part in _parts(tensors, name)]
        if types[0] != _codes_dtype(result) or types[1] not in ("F16", "F32") or len(set(types[1:])) > 1:
            raise UserError(f"{where} has parts of types {', '.join(types)}, which do not fit: copy the model again.")

    def read(self, tensors: StoredTensors, name: str, shape: tuple[int, ...]) -> Packed:
        parts = _parts(tensors, name)
        kinds = [f"{part.rpartition('.')[2]}{F32 if tensors.stored_dtype(part) == 'F32' else ''}" for part in parts[1:]]
        scheme = _stored_scheme(tensors, name, shape)
        assert scheme is not None, "checked before"
        return Packed(scheme.name, (shape[0], shape[1]), ("codes", *kinds), partial(_arrays, tensors, parts))

    def decode(self, packed: Packed) -> np.ndarray:
        scheme = Scheme.of(packed.format)
        assert scheme
        codes, *constants = packed.read()
        parts = dict(zip((part.removesuffix(F32) for part in packed.parts[1:]), constants, strict=True))
        unpacked = unpack(codes.view(np.uint8), packed.shape[1], scheme.bits)
        return decode(unpacked, parts.get("table"), parts.get("scales"), scheme.bits).astype(np.float32)

    def tensors(self, name: str, packed: Packed, dtype: str) -> dict[str, np.ndarray]:
        names = (name, *(f"{name}.{part.removesuffix(F32)}" for part in packed.parts[1:]))
        return dict(zip(names, packed.read(), strict=True))


def _parts(tensors: StoredTensors, name: str) -> list[str]:
    """The names of a matrix's tensors, in the order of a `Packed`'s parts."""
    return [name, *(name + part for part in (TABLE, SCALES) if name + part in tensors)]


def _codes_dtype(scheme: Scheme) -> str:
    return "I8" if scheme.bits == 8 else "U8"


def _stored_scheme(tensors: StoredTensors, name: str, shape: tuple[int, ...]) -> Scheme | None:
    """The scheme that the shapes of a matrix's table and scales mean, or None."""
    bits, group = 8, ROW
    if name + TABLE in tensors:
        values = tensors.shape(name + TABLE)[-1:]
        bits = next((bits for bits in KINDS if (table_size(bits),) == values), 0)
    if name + SCALES in tensors:
        count = (*tensors.shape(name + SCALES), 0)[0]
        group = next((group for group in GROUPS if group * count == shape[-1]), ROW)
    return Scheme(bits, group) if bits else None


def _as_stored(scheme: Scheme, shape: tuple[int, ...]) -> Scheme:
    """The scheme as shapes tell: a row of int8 that is as long as a group is the same with either."""
    return replace(scheme, group=shape[-1]) if scheme == Scheme(8, ROW) and shape[-1] in GROUPS else scheme


def _arrays(tensors: StoredTensors, parts: list[str]) -> tuple[np.ndarray, ...]:
    return tuple(tensors.array(part, tensors.stored_dtype(part)).reshape(tensors.shape(part)) for part in parts)
