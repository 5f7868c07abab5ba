"""Low-bit base formats: codes of 2, 3 or 4 bits with a table per row, or of 8 bits, with scales of groups of inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.tensor import NUMPY, Storage, Tensor, persistent
from wgpu_lora.names.spelling import setting
from wgpu_lora.ops.linear.frozen_product import FrozenProduct
from wgpu_lora.ops.linear.trained_matrix import F16_MAX
from wgpu_lora.weights.base import ConstantWeight, Loading, MatrixSource, Packed, Shared, StoredTensors, read, write
from wgpu_lora.weights.lowbit.kmeans_kernels import fit, fit_int8
from wgpu_lora.weights.lowbit.lowbit_layout import (
    GROUPS,
    KINDS,
    ROW,
    Mix,
    Scheme,
    constant_count,
    decode,
    format_of,
    from_words,
    join_constants,
    row_bytes,
    scale_count,
    scheme_of,
    split_constants,
    suffix,
    table_size,
    to_words,
    unpack,
    word_rows,
)
from wgpu_lora.weights.lowbit.lowbit_packing import pack_lowbit, packing_scratch
from wgpu_lora.weights.lowbit.lowbit_products import codes_product
from wgpu_lora.weights.lowbit.lowbit_training import CONSTANTS, TrainedCodes, constants_shape

MLP_SHARE = 0.75  # of a layer's weights, in common models


@dataclass(frozen=True)
class LowBitWeight(ConstantWeight):
    """Codes and constants. Forward and backward read the same codes.

    codes: u32 [words, out], see `lowbit_layout.to_words`.
    constants: f16 or f32, flat: all tables [out, 2^bits], then all scales [groups, out].
    stored: the file has it in this scheme, so it is loaded without requantising.
    """

    out_features: int
    in_features: int
    scheme: Scheme
    codes: Tensor
    constants: Tensor
    stored: bool

    @property
    def format(self) -> str:
        return self.scheme.name

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def operands(self) -> tuple[Tensor, ...]:
        return self.codes, self.constants

    def with_operands(self, *operands: Tensor) -> LowBitWeight:
        codes, constants = operands
        return replace(self, codes=codes, constants=constants)

    def fused(self, weights: Sequence[LowBitWeight], operands: Sequence[Tensor]) -> FrozenProduct:
        outs = tuple(weight.out_features for weight in weights)
        return codes_product(outs, self.in_features, self.scheme.bits, self.scheme.group, *operands)

    def storages(self) -> list[Storage]:
        return [self.codes.storage, self.constants.storage]

    # -- contents --------------------------------------------------------------------------------------------------

    def scratch(self) -> Mapping[str, int]:
        return {} if self.stored else packing_scratch(self.shape, self.scheme.bits, self.scheme.group)

    def load(self, loading: Loading, source: MatrixSource, name: str) -> None:
        packed = source.packed(name)
        if packed is None:
            of = self.shape, self.scheme.bits, self.scheme.group
            constants = pack_lowbit(loading, source, name, self.codes, *of, loading.importance.get(name))
            self._write_constants(loading.device, join_constants(*constants))
            return
        codes, *parts = packed.read()
        self.fill(loading.device, codes.view(np.uint8), *parts)

    def fill(self, device: Device, packed: np.ndarray, *constants: np.ndarray) -> None:
        """Writes codes as files have them, and the table and scales that the scheme has."""
        write(device, self.codes, to_words(packed, self.in_features, self.scheme.bits))
        self._write_constants(device, np.concatenate([part.reshape(-1) for part in constants]))

    def _write_constants(self, device: Device, flat: np.ndarray) -> None:
        write(device, self.constants, flat.astype(NUMPY[self.constants.dtype]))

    def _read(self, device: Device) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Codes as files have them, the table and the scales."""
        codes = from_words(read(device, self.codes), self.in_features, self.scheme.bits)
        constants = split_constants(read(device, self.constants), self.shape, self.scheme.bits, self.scheme.group)
        return codes, *constants

    def packed(self, device: Device) -> Packed:
        codes, *constants = self._read(device)
        return self._to_packed(codes, constants, self.constants.dtype)

    def _to_packed(self, codes: np.ndarray, constants: Sequence[np.ndarray | None], dtype: str) -> Packed:
        """Codes, a table and scales as files store them. dtype: of table and scales."""
        kind = F32 if dtype == "f32" else ""
        names = [f"{name}{kind}" for name, part in zip(("table", "scales"), constants, strict=True) if part is not None]
        arrays = codes.view(np.int8) if self.scheme.bits == 8 else codes, *(c for c in constants if c is not None)
        return Packed(self.format, self.shape, ("codes", *names), lambda: arrays)

    def values(self, device: Device) -> np.ndarray:
        codes, table, scales = self._read(device)
        bits = self.scheme.bits
        return decode(unpack(codes, self.in_features, bits), table, scales, bits).astype(np.float32)

    # -- training of the constants, see models.quant_constants -----------------------------------------------------

    def constant_shapes(self) -> dict[str, tuple[int, int]]:
        return {CONSTANTS: constants_shape(self.shape, self.scheme.bits, self.scheme.group)}

    def read_constants(self, device: Device) -> dict[str, np.ndarray]:
        values = read(device, self.constants).astype(np.float32)
        return {name: values.reshape(shape) for name, shape in self.constant_shapes().items()}

    def with_constants(
        self, constants: Mapping[str, Tensor], grads: Mapping[str, Tensor], ranges: Tensor
    ) -> TrainedCodes:
        bits, group, own = self.scheme.bits, self.scheme.group, constants[CONSTANTS]
        return TrainedCodes(*self.shape, bits, group, self.codes, own, grads=grads, ranges=ranges)

    def packed_with(self, device: Device, constants: Mapping[str, np.ndarray], dtype: str) -> Packed:
        codes, *_ = self._read(device)
        values = constants[CONSTANTS].reshape(-1)
        if dtype == "f16":
            values = values.clip(-F16_MAX, F16_MAX)
        parts = split_constants(values.astype(NUMPY[dtype]), self.shape, self.scheme.bits, self.scheme.group)
        return self._to_packed(codes, parts, dtype)

    def synthetic(self, rng: np.random.Generator) -> Iterator[tuple[Tensor, np.ndarray]]:
        bits, group = self.scheme.bits, self.scheme.group
        yield self.codes, rng.integers(0, 2**32, self.codes.shape, np.uint32)
        table = rng.standard_normal((self.out_features, table_size(bits)), np.float32) * (1 if group else 0.02)
        count = scale_count(self.in_features, bits, group)
        spread = 0.02 if table_size(bits) else 0.02 / 74  # the deviation of codes of all 256 values
        scales = spread * (0.5 + rng.random((count, self.out_features)))
        constants = join_constants(table if table.size else None, scales if scales.size else None)
        yield self.constants, constants.astype(NUMPY[self.constants.dtype])


def quantised(w: np.ndarray, scheme: Scheme) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """The NumPy reference: codes, table and scales of W, float32 [out, in]."""
    values = np.nan_to_num(w, nan=0.0, posinf=0.0, neginf=0.0)  # models.loaded_model reports them
    if scheme.bits == 8:
        codes, scales = fit_int8(values, scheme.group)
        return codes, None, scales
    return fit(values, scheme.bits, scheme.group)


# -- how low-bit matrices are stored in a checkpoint -------------------------------------------------------------------
#
# `X.weight` has the codes: U8 [out, bytes] as `lowbit_layout.pack` packs them or, for 8 bits, I8 [out, in].
# `X.weight.table` is [out, 2^bits], for 2 to 4 bits, and `X.weight.scales` is [groups, out]; both are F16 or both F32.
# The scheme of a matrix follows from these shapes; it must be that which config.json states:
#
#     "quantization_config": {"quant_method": "wgpu_lora", "base_dtype": "q2a4", "mlp": "lut2", "attention": "lut4"}

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


@dataclass(frozen=True)
class LowBit:
    """A base format of one scheme."""

    scheme: Scheme
    packed_form: ClassVar[LowBitFiles] = LowBitFiles()

    @property
    def name(self) -> str:
        return self.scheme.name

    @property
    def bits(self) -> float:
        return self.scheme.bits + (16 / self.scheme.group if self.scheme.group else 0)

    def declare(self, shape: tuple[int, int], name: str, shared: Shared, packed: Packed | None = None) -> LowBitWeight:
        (out, size_in), bits, group = shape, self.scheme.bits, self.scheme.group
        if group and size_in % group:
            fits = [*(g for g in GROUPS if size_in % g == 0), ROW]
            choice = setting("base_dtype", KINDS[bits] + suffix(fits[0]))
            raise UserError(f"{name} has {size_in:,} inputs, which groups of {group} do not divide: use {choice}.")
        dtype = "f32" if packed and packed.parts[-1].endswith(F32) else "f16"
        codes = persistent((word_rows(size_in, bits), out), "u32", "base", f"{name}.codes")
        constants = persistent((constant_count(out, size_in, bits, group),), dtype, "base", f"{name}.constants")
        return LowBitWeight(out, size_in, self.scheme, codes, constants, packed is not None)

    def round_trip(self, w: np.ndarray) -> np.ndarray:
        codes, table, scales = quantised(w, self.scheme)
        return decode(codes, table, scales, self.scheme.bits).astype(np.float32)


@dataclass(frozen=True)
class LowBitMix:
    """A base format of one scheme for the MLP and one for attention."""

    mix: Mix
    packed_form: ClassVar[LowBitFiles] = LowBit.packed_form

    @property
    def name(self) -> str:
        return self.mix.name

    @property
    def bits(self) -> float:
        return MLP_SHARE * LowBit(self.mix.mlp).bits + (1 - MLP_SHARE) * LowBit(self.mix.attention).bits

    def declare(self, shape: tuple[int, int], name: str, shared: Shared, packed: Packed | None = None) -> LowBitWeight:
        return LowBit(self.mix.scheme(name)).declare(shape, name, shared, packed)

    def round_trip(self, w: np.ndarray) -> np.ndarray:
        return LowBit(self.mix.mlp).round_trip(w)


def lowbit_format(name: str) -> LowBit | LowBitMix:
    """The low-bit format of this name. Raises ValueError if it is of none."""
    result = format_of(name)
    return LowBit(result) if isinstance(result, Scheme) else LowBitMix(result)


LUT4, LUT3, LUT2, INT8 = (LowBit(Scheme(bits)) for bits in (4, 3, 2, 8))
