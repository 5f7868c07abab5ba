"""A model as a GGUF file, with or without an adapter merged into it, written tensor by tensor."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from wgpu_lora.bounded import check_name
from wgpu_lora.errors import UserError
from wgpu_lora.atomic import UMASK
from wgpu_lora.formats.gguf import metadata, mix
from wgpu_lora.formats.gguf.names import ARCHITECTURES, gguf_name, rotated_heads, to_neighbours
from wgpu_lora.export.gguf_vocabulary import read_vocabulary, write_vocabulary
from wgpu_lora.formats.hub import is_gguf
from wgpu_lora.export.merge import F16_MAX, MergedModel

# Name -> (shape, type, the bytes in order).
Tensors = dict[str, tuple[tuple[int, ...], GGMLQuantizationType, Callable[[], Iterator[np.ndarray]]]]


@dataclass(frozen=True)
class Written:
    """What an export came to: the file's bytes, its tensors' bytes and values, and what llama.cpp does otherwise."""

    nbytes: int
    tensor_nbytes: int
    values: int
    notes: tuple[str, ...] = ()

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.tensor_nbytes / self.values


def export_model(
    model: Path,
    output: Path,
    kind: str = "f16",
    adapter: Path | None = None,
    name: str | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> Written:
    """Writes a model that llama.cpp loads.

    Args:
        model: its directory, in full precision, or a GGUF file, whose types are decoded.
        adapter: a PEFT directory, merged as `merge` does.
        kind: one of `mix.FILE_TYPES`. name: general.name; the directory's own where there is none.
        progress: called with each tensor's name once it is written.

    Raises:
        UserError: something cannot be read, does not fit, or has no counterpart in llama.cpp; `output` exists.
    """
    if kind not in mix.FILE_TYPES:
        raise UserError(f"--quantize {kind} is not known: choose one of {', '.join(mix.FILE_TYPES)}.")
    refuse_existing(output)
    merged = MergedModel(model, adapter)
    config = merged.config
    metadata.check_expressible(config, model)
    vocabulary = read_vocabulary(merged.tokenizer, config, model)

    def packed(own: str, target: GGMLQuantizationType) -> Iterator[np.ndarray]:
        heads = rotated_heads(config, own)
        for values in merged.pieces(own, config.head_dim if heads else 1):
            _check_range(values, own, target)
            rows = to_neighbours(values, len(values) // config.head_dim) if heads else values
            yield mix.pack(rows, target)
        progress(own)

    tensors: Tensors = {}
    for own, shape in merged.shapes.items():
        target = mix.tensor_type(config, kind, gguf_name(own), shape)
        tensors[gguf_name(own)] = (shape, target, partial(packed, own, target))
    freqs = metadata.rope_freqs(config)
    if freqs is not None:
        tensors[metadata.ROPE_FREQS] = (freqs.shape, GGMLQuantizationType.F32, lambda: iter([freqs]))
    with new_gguf(output, ARCHITECTURES[config.architecture]) as writer:
        count = sum(prod(shape) for shape in merged.shapes.values())
        finetune = adapter.absolute().name if adapter else ""
        file_type = mix.FILE_TYPES[kind].number
        metadata.write_general(
            writer,
            name or (model.absolute().stem if is_gguf(model) else model.absolute().name),
            file_type,
            count,
            finetune,
        )
        metadata.write_shape(writer, config)
        write_vocabulary(writer, vocabulary)
        write_tensors(writer, tensors)
    nbytes = sum(mix.nbytes(shape, target) for shape, target, _ in tensors.values())
    notes = (*metadata.notes_on(config), *vocabulary.notes)
    return Written(output.stat().st_size, nbytes, count, notes)


def _check_range(values: np.ndarray, name: str, target: GGMLQuantizationType) -> None:
    """UserError where a value is beyond the 16-bit floats that all types but F32 are made of."""
    if target != GGMLQuantizationType.F32 and np.abs(values).max(initial=0) > F16_MAX:
        raise UserError(f"{name} has values beyond {F16_MAX:,.0f}, the most of a GGUF matrix: write it with merge.")


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
        writer.add_tensor_info(name, shape, np.dtype(np.float32), mix.nbytes(shape, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    (file,) = writer.fout
    writer.write_padding(file, file.tell())
    for name, (shape, kind, pieces) in tensors.items():
        written = sum(file.write(np.ascontiguousarray(piece).data) for piece in pieces())
        if written != mix.nbytes(shape, kind):
            raise ValueError(f"{name}: {written} bytes came, but its shape takes {mix.nbytes(shape, kind)}")
        writer.write_padding(file, written)
