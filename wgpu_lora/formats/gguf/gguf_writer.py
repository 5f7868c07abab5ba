"""Writes a GGUF file tensor by tensor. It appears only once it is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFWriter, quants
from gguf.constants import GGMLQuantizationType

from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import check_new, new_file
from wgpu_lora.formats.gguf.kquants import quantize_k
from wgpu_lora.names.spelling import flag

# Name -> (shape, its type in each file, pieces: the bytes for each file).
Pieces = Callable[[], Iterator[Sequence[np.ndarray]]]
Tensors = dict[str, tuple[tuple[int, ...], Sequence[GGMLQuantizationType], Pieces]]


def check_new_gguf(output: Path) -> None:
    """Raises UserError if `output` exists, or is not a suitable path."""
    check_new(output, flag("output"))
    if output.suffix.lower() != ".gguf":
        raise UserError(f"{output} does not end in .gguf: add the extension, which other programs expect.")


@contextmanager
def new_gguf(output: Path, architecture: str) -> Iterator[GGUFWriter]:
    """A writer for a temporary file that becomes `output` on success, and is removed on failure."""
    with new_file(output, flag("output")) as temporary:
        writer = GGUFWriter(temporary, architecture)
        try:
            yield writer
            writer.close()
        except BaseException:
            with suppress(OSError):  # closing flushes the buffer, which may fail again
                writer.close()
            raise


def write_tensors(writers: Sequence[GGUFWriter], tensors: Tensors) -> None:
    """Writes the headers, the metadata and the tensors of several files at once, piece by piece."""
    for number, writer in enumerate(writers):
        for name, (shape, kinds, _) in tensors.items():
            size = nbytes(shape, kinds[number])
            writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=kinds[number])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        file = _file(writer)
        writer.write_padding(file, file.tell())
    for name, (shape, kinds, pieces) in tensors.items():
        counts = [0] * len(writers)
        for piece in pieces():
            for number, (writer, values) in enumerate(zip(writers, piece, strict=True)):
                counts[number] += _file(writer).write(np.ascontiguousarray(values).data)
        for writer, count, kind in zip(writers, counts, kinds, strict=True):
            if count != nbytes(shape, kind):
                raise ValueError(f"{name}: got {count} bytes, expected {nbytes(shape, kind)}")
            writer.write_padding(_file(writer), count)


def _file(writer: GGUFWriter) -> BinaryIO:
    assert writer.fout is not None
    (file,) = writer.fout
    return cast("BinaryIO", file)


Q = GGMLQuantizationType
K_BITS = {Q.Q4_K: 4, Q.Q5_K: 5, Q.Q6_K: 6}


def nbytes(shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    """Size in bytes of a tensor whose last dimension is whole blocks of its type."""
    block, size = GGML_QUANT_SIZES[kind]
    return int(np.prod(shape, dtype=np.int64)) // block * size


def pack(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Packs float32 rows, which must be whole blocks of the type, into bytes."""
    if kind in K_BITS:
        return quantize_k(values, K_BITS[kind])
    return quants.quantize(values, kind)
