"""Streams a checkpoint onto the device: a matrix is uploaded piece by piece and packed there, never held whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial

import ml_dtypes
import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.formats.bitsandbytes import PackedCheckpoint, to_words
from wgpu_lora.formats.checkpoint import WeightSource
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Arena, Program, allocate, release
from wgpu_lora.gpu.tensor import ALIGNMENT, ITEM_BYTES, Tensor, align, persistent
from wgpu_lora.models.audit import AuditedSource
from wgpu_lora.models.config import LINEAR_PATHS
from wgpu_lora.models.decoder import Decoder
from wgpu_lora.names.naming import setting
from wgpu_lora.weights.dense import DenseWeight
from wgpu_lora.weights.nf4 import NF4Weight, nf4_absmax, nf4_encode
from wgpu_lora.weights.nf4_codes import BLOCK, DYNAMIC_CODE, double_quantize

MOST = {"f16": 65504.0, "bf16": 3.3895313892515355e38}
STAGING = 32 << 20  # bytes of a piece on its way to the device
DTYPES = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
Progress = Callable[[str], None]


def table_dtype(checkpoint: WeightSource) -> str:
    """The type that the embedding is stored in, and kept in."""
    return DTYPES[checkpoint.dtype("model.embed_tokens.weight")]


def load_weights(
    device: Device, checkpoint: WeightSource, model: Decoder, progress: Progress = lambda name: None
) -> str:
    """Allocates the model's tensors and fills them; returns the SHA-256 of their values (see AuditedSource).

    Args:
        progress: called with each tensor's name once it is loaded.

    Raises:
        NotFiniteError: a tensor, by name, holds NaN or infinity. UserError: a file is damaged.
    """
    try:
        with AuditedSource(checkpoint) as audited, ExitStack() as stack:
            packer = stack.enter_context(closing(_Packer(device, model))) if model.packs else None
            _fill(device, audited, model, packer, progress)
            return audited.digest()
    except BaseException:
        release(device, model.storages())
        raise


def _fill(device: Device, checkpoint: WeightSource, model: Decoder, packer: _Packer | None, progress: Progress) -> None:
    allocate(device, model.storages())
    if model.dynamic.storage.buffer is not None:
        device.write(model.dynamic.storage.buffer, DYNAMIC_CODE)

    def vector(name: str, tensor: Tensor) -> None:
        device.write(tensor.storage.buffer, checkpoint.read_f32(name))
        progress(name)

    def dense(name: str, weight: DenseWeight) -> None:
        _upload_dense(device, checkpoint, name, weight)
        progress(name)

    dense("model.embed_tokens.weight", model.embedding)
    if model.head is not model.embedding:
        dense("lm_head.weight", model.head)
    vector("model.norm.weight", model.final_norm)
    for i, layer in enumerate(model.layers):
        prefix = f"model.layers.{i}."
        for name, norm in layer.norms.items():
            vector(f"{prefix}{name}.weight", norm)
        for module, item in layer.linears.items():
            path = f"{prefix}{LINEAR_PATHS[module]}"
            if item.bias:
                vector(f"{path}.bias", item.bias)
            if isinstance(item.weight, DenseWeight):
                dense(f"{path}.weight", item.weight)
            elif isinstance(item.weight, NF4Weight):
                fill = packer.pack if packer else partial(_upload_packed, device)
                fill(checkpoint, f"{path}.weight", item.weight)
                progress(f"{path}.weight")


def tensor_count(model: Decoder) -> int:
    """How many tensors loading names, one after the other."""
    of_layers = sum(
        len(layer.norms) + sum(1 + bool(item.bias) for item in layer.linears.values()) for layer in model.layers
    )
    return 2 + (model.head is not model.embedding) + of_layers


def staging_bytes(model: Decoder) -> int:
    """Bytes that loading holds on the device beside the model itself."""
    return sum(t.storage.nbytes for t in _staging(model)) + ALIGNMENT if model.packs else 0


def stored_as(checkpoint: WeightSource) -> Callable[[str], str] | None:
    """What `Decoder.declare` asks of a checkpoint: how each linear is stored, where that decides how it is kept."""
    if not isinstance(checkpoint, PackedCheckpoint):
        return None

    def kind(name: str) -> str:
        nested = checkpoint.nested(name)
        return DTYPES[checkpoint.dtype(name)] if nested is None else "nf4" if nested else "nf4 absmax"

    return kind


def _upload_packed(device: Device, checkpoint: WeightSource, name: str, weight: NF4Weight) -> None:
    stored = checkpoint.packed(name)
    assert stored, f"{name} was declared as packed"
    device.write(weight.codes.storage.buffer, to_words(stored))
    if isinstance(stored.constants, np.ndarray):
        device.write(weight.constants[0].storage.buffer, stored.constants)
        return
    codes, nested, offset = stored.constants
    device.write(weight.constants[0].storage.buffer, codes)
    device.write(weight.constants[1].storage.buffer, np.append(nested, np.float32(offset)).astype(np.float32))


def _upload_dense(device: Device, checkpoint: WeightSource, name: str, weight: DenseWeight) -> None:
    first = 0
    for part in weight.parts:
        row_bytes = part.shape[1] * ITEM_BYTES[weight.dtype]
        step = max(1, STAGING // row_bytes)
        step = step // 2 * 2 or 2  # an even number of rows keeps every piece on a whole word
        for start in range(0, part.shape[0], step):
            stop = min(start + step, part.shape[0])
            device.write(
                part.storage.buffer,
                _rows_as(checkpoint, name, weight.dtype, first + start, first + stop),
                start * row_bytes,
            )
        first += part.shape[0]


def _rows_as(checkpoint: WeightSource, name: str, dtype: str, start: int, stop: int) -> np.ndarray:
    if DTYPES.get(checkpoint.dtype(name)) == dtype:
        return checkpoint.read_raw(name, start, stop)
    target = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}[dtype]
    values = checkpoint.read_f32(name, start, stop)
    most = MOST.get(dtype, np.inf)
    if most < np.abs(values).max() < np.inf:  # what is not finite is said by AuditedSource
        raise UserError(
            f"{name} has values beyond {dtype}'s range of {most:,.6g}: use {setting('base_dtype', 'nf4')} or f32."
        )
    with np.errstate(over="ignore"):
        return values.astype(target)


def _staging(model: Decoder) -> tuple[Tensor, Tensor]:
    """(raw rows, their absmax), large enough for any piece: pieces are whole multiples of 64 rows."""
    sizes = model.config.linear_shapes().values()
    largest = max(min(out, piece_rows(size_in)) * size_in for out, size_in in sizes)
    return (
        persistent((largest,), "f32", "workspace", "staging"),
        persistent((align(4 * -(-largest // BLOCK)) // 4,), "f32", "workspace", "absmax"),
    )


def piece_rows(size_in: int) -> int:
    """Rows of a matrix that are packed at a time; multiples of 64 start at a whole block of the flattened matrix."""
    return max(BLOCK, STAGING // (4 * size_in) // BLOCK * BLOCK)


class _Packer:
    """Packs matrices to NF4 on the device; only the block constants, 1/64 of the values, pass through the host."""

    def __init__(self, device: Device, model: Decoder):
        self.device = device
        self.staging, self.absmax = _staging(model)
        self.arena = Arena(device)
        allocate(device, {self.staging.storage, self.absmax.storage})

    def pack(self, checkpoint: WeightSource, name: str, weight: NF4Weight) -> None:
        kind, size_in = DTYPES[checkpoint.dtype(name)], weight.in_features
        constants = []
        for first in range(0, weight.out_features, piece_rows(size_in)):
            rows = min(piece_rows(size_in), weight.out_features - first)
            blocks = -(-rows * size_in // BLOCK)
            self.device.write(self.staging.storage.buffer, checkpoint.read_raw(name, first, first + rows))
            program = Program(self.device, "pack")
            program.dispatch(nf4_absmax, self.staging, self.absmax, size=rows * size_in, b_type=kind)
            program.dispatch(
                nf4_encode,
                self.staging,
                self.absmax,
                weight.codes,
                rows=rows,
                first=first,
                out=weight.out_features,
                size_in=size_in,
                b_type=kind,
            )
            allocate(self.device, program.persistent_storages())
            program.build(self.arena)
            program.run()
            constants.append(self.device.read(self.absmax.storage.buffer, 4 * blocks).view(np.float32).copy())
            program.release()
        with np.errstate(invalid="ignore"):  # the same: it looks at the values meanwhile
            codes, nested, offset = double_quantize(np.concatenate(constants))
        self.device.write(weight.constants[0].storage.buffer, codes)
        self.device.write(weight.constants[1].storage.buffer, np.append(nested, offset).astype(np.float32))

    def close(self) -> None:
        release(self.device, {self.staging.storage, self.absmax.storage})
