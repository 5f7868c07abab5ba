"""Writes a GGUF file tensor by tensor. It appears only once it is complete."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType

from wgpu_lora.atomic import UMASK
from wgpu_lora.bounded import check_name
from wgpu_lora.errors import UserError
from wgpu_lora.formats.gguf.types import nbytes
from wgpu_lora.names.naming import flag

# Name -> (shape, type, the bytes in pieces).
Tensors = dict[str, tuple[tuple[int, ...], GGMLQuantizationType, Callable[[], Iterator[np.ndarray]]]]


def refuse_existing(output: Path) -> None:
    """Raises UserError if `output` exists, or is not a suitable path."""
    check_name(output)
    if output.is_dir():
        raise UserError(f"{output} is a directory: name a file in it, such as {output / 'model.gguf'}.")
    if output.exists() or output.is_symlink():
        raise UserError(f"{output} exists already: choose another {flag('output')}, or remove it.")
    if output.suffix.lower() != ".gguf":
        raise UserError(f"{output} does not end in .gguf: add the extension, which other programs expect.")
    if not output.absolute().parent.is_dir():
        raise UserError(f"The directory {output.parent} of {flag('output')} does not exist: create it first.")


@contextmanager
def new_gguf(output: Path, architecture: str) -> Iterator[GGUFWriter]:
    """A writer for a temporary file that becomes `output` on success, and is removed on failure."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{output.name}.", suffix=".tmp", dir=output.absolute().parent)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}.") from None
    os.close(descriptor)
    temporary = Path(name)
    writer = GGUFWriter(temporary, architecture)
    try:
        yield writer
        for file in writer.fout or []:
            file.flush()
            os.fsync(file.fileno())
        writer.close()
        temporary.chmod(0o666 & ~UMASK)  # mkstemp creates files that only their owner can read
        temporary.replace(output)
    except BaseException:
        try:
            with suppress(OSError):  # closing flushes the buffer, which may fail again
                writer.close()
        finally:
            temporary.unlink(missing_ok=True)
        raise


def write_tensors(writer: GGUFWriter, tensors: Tensors) -> None:
    """Writes the header, the metadata and the tensors, piece by piece."""
    for name, (shape, kind, _) in tensors.items():
        writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes(shape, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    (file,) = writer.fout
    writer.write_padding(file, file.tell())
    for name, (shape, kind, pieces) in tensors.items():
        written = sum(file.write(np.ascontiguousarray(piece).data) for piece in pieces())
        if written != nbytes(shape, kind):
            raise ValueError(f"{name}: got {written} bytes, expected {nbytes(shape, kind)}")
        writer.write_padding(file, written)
