"""Reads a GGUF file's weights under Hugging Face's names, decoded a few rows at a time."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind

from wgpu_lora.errors import UserError
from wgpu_lora.formats.gguf.gguf_header import Header, TensorInfo
from wgpu_lora.formats.gguf.gguf_layout import PLAIN_LAYOUT, Layout, file_shape, read_rows_in_order
from wgpu_lora.formats.safetensors_checkpoint import EDGE_BYTES
from wgpu_lora.weights.base_formats import GGUF_PATTERN

if TYPE_CHECKING:
    from wgpu_lora.weights.base import Packed

F16_MAX = 65504.0
PLAIN = {Kind.F32: "F32", Kind.F16: "F16", Kind.BF16: "BF16"}
_INTEGERS = (Kind.I8, Kind.I16, Kind.I32, Kind.I64, Kind.F64)
_GROUP_VALUES = 1 << 16  # values decoded at a time; the library's groups of 16 rows may be large


@dataclass(frozen=True)
class GGUFTensor:
    """A parameter in the file: its name there and its shape.

    table: an embedding or LM head, which is not quantised on loading.
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout = PLAIN_LAYOUT
    table: bool = False


class GGUFCheckpoint:
    """The parameters of a model in a GGUF file, by their names in Hugging Face checkpoints.

    Args:
        passed_over: pattern of tensors in the file to ignore.

    Raises:
        UserError: a tensor is missing, unknown, of the wrong shape, or of a type that cannot be decoded.
    """

    def __init__(self, header: Header, tensors: Mapping[str, GGUFTensor], passed_over: str = ""):
        self.path, self._stored_as = header.path, tensors
        self._tensors = _checked(header, tensors, re.compile(passed_over))

    def names(self) -> list[str]:
        """The tensors' names, sorted."""
        return sorted(self._tensors)

    def quantised(self, name: str) -> str | None:
        """The type of a quantised tensor, such as Q4_K; None if it has plain values."""
        kind = self._tensors[name].kind
        return None if kind in PLAIN else kind.name

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored_as[name].shape

    def dtype(self, name: str) -> str:
        """The dtype of `read_raw`: the stored one if it is a float, else 'F32', or 'F16' for an embedding or LM head.

        Those stay dense, and the 11 bits of F16 are far finer than any quantisation.
        """
        if self._stored_as[name].layout.changes_values:
            return "F32"
        return PLAIN.get(self._tensors[name].kind, "F16" if self._stored_as[name].table else "F32")

    def read_raw(self, name: str, row_start: int = 0, row_stop: int | None = None) -> np.ndarray:
        """Bits of rows [row_start, row_stop): uint16 (BF16, F16) or uint32 (F32), [rows, *shape[1:]].

        For a 1-D tensor, a row is an element.

        Raises:
            UserError: the file has been truncated since it was opened, or a value of a table is out of F16's range.
            ValueError: the rows are out of range.
        """
        tensor, kind = self._stored_as[name], self._tensors[name].kind
        if kind in PLAIN and not tensor.layout.changes_values:
            rows = self._rows(name, row_start, row_stop).view("<u4" if kind == Kind.F32 else "<u2")
            return self._shaped(name, rows)
        values = self.read_f32(name, row_start, row_stop)
        if not tensor.table:
            return values.view(np.uint32)
        if np.abs(values).max(initial=0) > F16_MAX:
            raise UserError(f"{name} in {self.path} has values beyond F16's range: use another quantisation.")
        return values.astype(np.float16).view(np.uint16)

    def read_f32(self, name: str, row_start: int = 0, row_stop: int | None = None) -> np.ndarray:
        """The rows of `read_raw`, decoded to float32."""
        values = self._decoded(self._tensors[name], self._rows(name, row_start, row_stop))
        return self._shaped(name, self._stored_as[name].layout.values(values))

    def packed(self, name: str) -> Packed | None:
        """The tensor if it is stored in a base format that we write; here always None."""
        return None

    def base_format(self, name: str) -> str | None:
        """The base format that keeps a tensor as it is stored; None if there is none."""
        info = self._tensors[name]
        if info.kind in PLAIN:
            return self.dtype(name).lower()
        usable = re.fullmatch(GGUF_PATTERN, info.kind.name.lower()) and not self._stored_as[name].layout.changes_values
        return info.kind.name.lower() if usable and self._block_order(name) is not None else None

    def read_blocks(self, name: str, base_format: str, row_start: int, row_stop: int) -> np.ndarray:
        """Rows of a tensor in a type of GGUF files, which is its `base_format`: uint8 [rows, bytes]."""
        assert base_format == self._tensors[name].kind.name.lower()
        order = self._block_order(name)
        assert order is not None
        rows = self._rows(name, row_start, row_stop)
        if (np.diff(order) == 1).all():
            return rows
        return np.ascontiguousarray(rows.reshape(len(rows), order.size, -1)[:, order]).reshape(len(rows), -1)

    def _block_order(self, name: str) -> np.ndarray | None:
        """The file's blocks of a row in the checkpoint's order; None if that divides blocks."""
        info = self._tensors[name]
        (size_in,), block = info.shape[1:], GGML_QUANT_SIZES[info.kind][0]
        index = self._stored_as[name].layout.column_index(size_in)
        if index is None:
            return np.arange(size_in // block)
        positions = np.argsort(index).reshape(-1, block)
        whole = (positions[:, 0] % block == 0) & (np.diff(positions, axis=1) == 1).all(axis=1)
        return positions[:, 0] // block if whole.all() else None

    def digest(self) -> str:
        """A SHA-256 (hex) that identifies the file, as in `formats.safetensors_checkpoint.Checkpoint.digest`."""
        tensors = [(name, info.kind.name, list(info.shape)) for name, info in sorted(self._tensors.items())]
        sha = hashlib.sha256(json.dumps(tensors).encode())
        size = self.path.stat().st_size
        sha.update(size.to_bytes(8, "little"))
        with self.path.open("rb") as file:
            sha.update(file.read(EDGE_BYTES))
            file.seek(max(0, size - EDGE_BYTES))
            sha.update(file.read(EDGE_BYTES))
        return sha.hexdigest()

    def _shaped(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Rows with the checkpoint's order of columns and shape."""
        tensor = self._stored_as[name]
        rows = tensor.layout.columns_back(rows.reshape(len(rows), *file_shape(tensor.shape)[1:]))
        return np.ascontiguousarray(rows).reshape(-1, *tensor.shape[1:])

    def _decoded(self, info: TensorInfo, rows: np.ndarray) -> np.ndarray:
        """float32 [rows, *shape[1:]] of stored rows."""
        per_row = prod(info.shape[1:])
        if info.kind == Kind.F32:
            values = rows.view("<f4")
        elif info.kind == Kind.BF16:
            values = (rows.view("<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            step = max(1, _GROUP_VALUES // per_row)
            values = np.empty((len(rows), per_row), np.float32)
            with np.errstate(all="ignore"):  # a damaged scale may be any bits; AuditedSource reports non-finite values
                for first in range(0, len(rows), step):
                    part = rows[first : first + step]
                    values[first : first + step] = quants.dequantize(part.reshape(1, -1), info.kind).reshape(
                        len(part), -1
                    )
        return values.reshape(len(rows), *info.shape[1:])

    def _rows(self, name: str, start: int, stop: int | None) -> np.ndarray:
        """Stored rows in transformers' order: uint8 [rows, bytes per row]. Rows are whole blocks of every type."""
        info = self._tensors[name]
        count = info.shape[0]
        stop = count if stop is None else stop
        if not 0 <= start <= stop <= count:
            raise ValueError(f"rows {start}:{stop} of {name}, which has {count}")
        layout = self._stored_as[name].layout
        if layout.rows is None or start == stop:
            return self._raw_rows(name, start, stop)
        positions = np.argsort(layout.row_index(count))[start:stop]
        return read_rows_in_order(partial(self._raw_rows, name), positions)

    def _raw_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        info = self._tensors[name]
        row_bytes = info.nbytes // info.shape[0]
        count = (stop - start) * row_bytes
        result = np.fromfile(self.path, np.uint8, count, offset=info.offset + start * row_bytes)
        if result.size != count:
            raise UserError(f"{self.path} ended while {name} was read: download or copy the file again.")
        return result.reshape(stop - start, row_bytes)


def _checked(header: Header, tensors: Mapping[str, GGUFTensor], passed_over: re.Pattern[str]) -> dict[str, TensorInfo]:
    """The tensors by the model's names. Raises UserError (see `GGUFCheckpoint`)."""
    path, result = header.path, {}
    for name, tensor in tensors.items():
        stored_name, shape = tensor.name, file_shape(tensor.shape)
        info = header.tensors.get(stored_name)
        if info is None:
            raise UserError(f"{stored_name} is missing from {path}: download it again, or use another conversion.")
        if info.shape != shape:
            raise UserError(
                f"{stored_name} in {path} has shape {list(info.shape)} but its metadata require {list(shape)}: "
                "use another conversion of the model."
            )
        if len(shape) == 1 and info.kind not in PLAIN:
            raise UserError(
                f"{stored_name} in {path} is a vector stored as {info.kind.name}, expected F32, F16 or BF16: use "
                "another conversion of the model."
            )
        if not _decodable(info.kind):
            raise UserError(
                f"{stored_name} in {path} is stored as {info.kind.name}, which cannot be decoded: use another "
                "quantisation, such as Q8_0 or Q4_K_M."
            )
        result[name] = info
    names = {tensor.name for tensor in tensors.values()}
    for stored_name in header.tensors:
        if stored_name not in names and not passed_over.fullmatch(stored_name):
            raise UserError(
                f"{path} holds {stored_name!r:.100}, which its metadata do not account for: use another model."
            )
    return result


def _decodable(kind: Kind) -> bool:
    """Whether the gguf package can decode this type."""
    if kind in PLAIN:
        return True
    if kind in _INTEGERS:
        return False
    block = np.zeros((1, quants.quant_shape_to_byte_shape((1024,), kind)[0]), np.uint8)
    try:
        with np.errstate(all="ignore"):
            quants.dequantize(block, kind)
    except NotImplementedError:
        return False
    return True
