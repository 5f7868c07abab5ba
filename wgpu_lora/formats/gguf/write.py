"""Writing a GGUF file tensor by tensor: whole at the end, or not there."""

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

# Name -> (shape, type, the bytes in order).
Tensors = dict[str, tuple[tuple[int, ...], GGMLQuantizationType, Callable[[], Iterator[np.ndarray]]]]


def refuse_existing(output: Path) -> None:
    """UserError where nothing new can be written at `output`."""
    check_name(output)
    if output.is_dir():
        raise UserError(f"{output} is a directory: name a file in it, such as {output / 'model.gguf'}.")
    if output.exists() or output.is_symlink():
        raise UserError(f"{output} exists already: choose another --output, or remove it.")
    if output.suffix.lower() != ".gguf":
        raise UserError(f"{output} does not end in .gguf, which is how such files are known: name it so.")
    if not output.absolute().parent.is_dir():
        raise UserError(f"The directory {output.parent} of --output does not exist: make it first.")


@contextmanager
def new_gguf(output: Path, architecture: str) -> Iterator[GGUFWriter]:
    """A writer whose file becomes `output` at the end; whatever fails, nothing is there."""
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
        temporary.chmod(0o666 & ~UMASK)  # mkstemp's own mode would hide the file from everyone else
        temporary.replace(output)
    except BaseException:
        try:
            with suppress(OSError):  # what is buffered may not go either
                writer.close()
        finally:
            temporary.unlink(missing_ok=True)
        raise


def write_tensors(writer: GGUFWriter, tensors: Tensors) -> None:
    """Header, metadata and tensors, each taken piece by piece."""
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
            raise ValueError(f"{name}: {written} bytes came, but its shape takes {nbytes(shape, kind)}")
        writer.write_padding(file, written)
