"""NF4: 4-bit codes and double-quantised constants of blocks of 64, packed on the device (Dettmers et al. 2023)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.files.json_files import parse_object
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.kernel import U32, Dim, In, InOut, Offset, Out, ReadOnly, Word, kernel, linear_grid
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import Storage, Tensor, align, persistent
from wgpu_lora.ops.linear.frozen_product import FrozenProduct
from wgpu_lora.weights.base import (
    PIECE_BYTES,
    Loading,
    MatrixSource,
    Packed,
    Shared,
    StoredTensors,
    Weight,
    read,
    write,
)
from wgpu_lora.weights.dense import DTYPES
from wgpu_lora.weights.nf4.nf4_products import MATRICES, LayerScales, Scales, nf4_product
from wgpu_lora.weights.nf4.nf4_reference import (
    BLOCK,
    DYNAMIC_CODE,
    NAME,
    NESTED_BLOCK,
    NF4_CODE,
    NF4_MIDPOINTS,
    PARTS,
    decode_parts,
    double_quantize,
    from_words,
    round_trip,
    to_words,
)


@kernel("nf4_absmax.wgsl.j2", grid=lambda c: linear_grid(-(-c.size // BLOCK)), lib=("linear", "half"))
def nf4_absmax(w: ReadOnly, absmax: Out, *, size: U32, b_type: Word = "f32") -> Any:
    """absmax[b] = max |w| over block b of 64 flattened values; the last block may be shorter."""
    flat = np.abs(w.reshape(-1)[:size])
    return np.maximum.reduceat(flat, np.arange(0, size, BLOCK))


@kernel("nf4_encode.wgsl.j2", grid=lambda c: linear_grid(c.rows * -(-c.size_in // 8)), lib=("linear", "half"))
def nf4_encode(
    w: ReadOnly,
    absmax: In,
    codes: InOut,
    *,
    rows: Dim,
    first: Offset[Dim],
    out: Dim,
    size_in: Dim,
    b_type: Word = "f32",
) -> Any:
    """codes[k8, first + n] = the nearest NF4 codes of w[n, 8 k8 .. 8 k8 + 7], for the `rows` rows of w."""
    scale = 1 / np.maximum(np.repeat(absmax, BLOCK)[: rows * size_in], 1e-38)
    nearest = np.searchsorted(NF4_MIDPOINTS.astype(np.float64), w.reshape(-1)[: rows * size_in] * scale)
    padded = np.zeros((rows, -(-size_in // 8) * 8), np.uint64)
    padded[:, :size_in] = nearest.reshape(rows, size_in)
    words = (padded.reshape(rows, -1, 8) << (4 * np.arange(8, dtype=np.uint64))).sum(axis=2)
    result = codes.reshape(-1, out).copy()
    result[:, first : first + rows] = words.T
    return result


@dataclass(frozen=True)
class NF4Weight(Weight):
    """4-bit codes with double-quantised constants. Forward and backward read the same codes.

    codes: u32 [ceil(in / 8), out]; word (k8, n) packs W[n, 8 k8 .. 8 k8 + 7], lowest nibble first.
    constants: absmax_codes u8 [blocks], nested f32 [ceil(blocks / 256) + 1] whose last entry is the offset, and dynamic
        f32 [256]; or only absmax f32 [blocks], for checkpoints without double quantisation.
    stored: the file has it in NF4, so it is loaded without requantising.
    layer, index: the constants that are decoded with its own, and its index among them.
    """

    out_features: int
    in_features: int
    codes: Tensor
    constants: tuple[Tensor, ...]
    stored: bool
    layer: LayerScales | None = None
    index: int = 0
    format = NAME

    @property
    def operands(self) -> tuple[Tensor, ...]:
        return (self.codes, *self.constants) if len(self.constants) == 1 else (self.codes,)

    def with_operands(self, *operands: Tensor) -> NF4Weight:
        codes, *constants = operands
        return replace(self, codes=codes, constants=tuple(constants) or self.constants)

    def fused(self, weights: Sequence[NF4Weight], operands: Sequence[Tensor]) -> FrozenProduct | None:
        outs, scales = zip(*((weight.out_features, weight.scales) for weight in weights), strict=True)
        together = all(item.layer is scales[0].layer for item in scales[1:])
        return nf4_product(outs, self.in_features, operands[0], scales) if together else None

    @property
    def scales(self) -> Scales:
        if len(self.constants) == 1:
            return Scales(None, 0, self.constants[0])
        return Scales(self.layer or LayerScales((self.constants,)), self.index)

    @classmethod
    def of_layer(cls, weights: Sequence[Weight]) -> Sequence[Weight]:
        """The constants of double-quantised matrices are in shared storages."""
        result = list(weights)
        shared = [(i, w) for i, w in enumerate(weights) if isinstance(w, NF4Weight) and len(w.constants) > 1]
        for first in range(0, len(shared), MATRICES):
            numbers, own = zip(*shared[first : first + MATRICES], strict=True)
            layer = LayerScales.together([weight.constants for weight in own], own[0].codes.name)
            for index, (number, weight) in enumerate(zip(numbers, own, strict=True)):
                result[number] = replace(weight, constants=layer.constants[index], layer=layer, index=index)
        return result

    def storages(self) -> list[Storage]:
        return [t.storage for t in (self.codes, *self.constants)]

    # -- contents --------------------------------------------------------------------------------------------------

    def scratch(self) -> Mapping[str, int]:
        if self.stored:
            return {}
        _, rows = next(self.pieces())
        return {"staging": rows * self.in_features, "absmax": align(4 * self.blocks(rows)) // 4}

    def blocks(self, rows: int) -> int:
        """How many blocks this many rows have."""
        return -(-rows * self.in_features // BLOCK)

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yields (first row, rows) of the pieces packed at a time, the largest first. They start at whole blocks."""
        step = max(BLOCK, PIECE_BYTES // (4 * self.in_features) // BLOCK * BLOCK)
        for first in range(0, self.out_features, step):
            yield first, min(step, self.out_features - first)

    def record_packing(self, program: Program, w: Tensor, absmax: Tensor, first: int, rows: int, dtype: str) -> None:
        """Records the packing of W's rows [first, first + rows) from w. absmax: f32 [blocks], is computed too."""
        out, size_in = self.out_features, self.in_features
        program.dispatch(nf4_absmax, w, absmax, size=rows * size_in, b_type=dtype)
        shape: dict[str, Any] = {"rows": rows, "first": first, "out": out, "size_in": size_in, "b_type": dtype}
        program.dispatch(nf4_encode, w, absmax, self.codes, **shape)

    def load(self, loading: Loading, source: MatrixSource, name: str) -> None:
        packed = source.packed(name)
        if packed is None:
            self._pack(loading, source, name)
            return
        codes, *constants = packed.read()
        write(loading.device, self.codes, to_words(codes, packed.shape))
        self._write_constants(loading.device, *constants)

    def _pack(self, loading: Loading, source: MatrixSource, name: str) -> None:
        """Quantises on the device. Only the block constants, 1/64 of the values, are quantised on the host."""
        device, staging, absmax = loading.device, loading.scratch["staging"], loading.scratch["absmax"]
        result = []
        for first, rows in self.pieces():
            device.write(staging.storage.buffer, source.read_raw(name, first, first + rows))
            program, dtype = Program(device, "pack"), DTYPES[source.dtype(name)]
            values = replace(staging, shape=(rows, self.in_features), dtype=dtype)
            self.record_packing(program, values, replace(absmax, shape=(self.blocks(rows),)), first, rows, dtype)
            with loading.run(program):
                result.append(device.read(absmax.storage.buffer, 4 * self.blocks(rows)).view(np.float32).copy())
        with np.errstate(invalid="ignore"):  # models.loaded_model reports non-finite values
            codes, nested, offset = double_quantize(np.concatenate(result))
        self._write_constants(device, codes, np.append(nested, offset).astype(np.float32))

    def _write_constants(self, device: Device, *arrays: np.ndarray) -> None:
        for tensor, values in zip(self.constants, (*arrays, DYNAMIC_CODE), strict=False):
            write(device, tensor, values)

    def packed(self, device: Device) -> Packed:
        shape = (self.out_features, self.in_features)
        codes, *constants = (read(device, tensor) for tensor in (self.codes, *self.constants[:2]))
        arrays = (from_words(codes, shape), *constants)
        return Packed(self.format, shape, PARTS[: len(arrays)], lambda: arrays)

    def values(self, device: Device) -> np.ndarray:
        return decode_parts(self.packed(device).read(), (self.out_features, self.in_features))

    def synthetic(self, rng: np.random.Generator) -> Iterator[tuple[Tensor, np.ndarray]]:
        yield self.codes, rng.integers(0, 2**32, self.codes.shape, np.uint32)
        if len(self.constants) > 1:
            yield self.constants[0], rng.integers(0, 256, self.constants[0].shape, np.uint8)
            yield self.constants[2], DYNAMIC_CODE
        scale = self.constants[min(1, len(self.constants) - 1)]
        yield scale, (0.01 + 0.01 * rng.random(scale.shape)).astype(np.float32)


# -- how bitsandbytes and transformers store NF4 in a checkpoint -------------------------------------------------------
#
# `X.weight` is uint8 with two codes per byte, the first in the high nibble. It comes with `X.weight.absmax`,
# `X.weight.quant_map` and, with double quantisation, `X.weight.nested_absmax` and `X.weight.nested_quant_map`. The
# rest of bitsandbytes' QuantState is JSON in a uint8 tensor, `X.weight.quant_state.bitsandbytes__nf4`.

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


class _NF4:
    """The base format."""

    name = NAME
    packed_form = BitsAndBytesNF4()
    bits = 4 + 8 / BLOCK + 32 / (BLOCK * NESTED_BLOCK)

    def declare(self, shape: tuple[int, int], name: str, shared: Shared, packed: Packed | None = None) -> NF4Weight:
        out, size_in = shape
        blocks, stored = -(-out * size_in // BLOCK), packed is not None
        codes = persistent((-(-size_in // 8), out), "u32", "base", f"{name}.codes")
        if packed and len(packed.parts) == 2:
            return NF4Weight(out, size_in, codes, (persistent((blocks,), "f32", "base", f"{name}.absmax"),), stored)
        absmax_codes = persistent((blocks,), "u8", "base", f"{name}.absmax_codes")
        nested = persistent((-(-blocks // NESTED_BLOCK) + 1,), "f32", "base", f"{name}.nested")
        dynamic = shared.tables.setdefault("dynamic code", persistent((256,), "f32", "base", "dynamic code"))
        return NF4Weight(out, size_in, codes, (absmax_codes, nested, dynamic), stored)

    def round_trip(self, w: np.ndarray) -> np.ndarray:
        return round_trip(w)


NF4 = _NF4()
