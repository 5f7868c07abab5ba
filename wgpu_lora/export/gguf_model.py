"""Writes a model as a GGUF file, optionally with an adapter merged, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import prod
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFWriter, LlamaFileType, size_label

from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Events
from wgpu_lora.export import mix
from wgpu_lora.export.gguf_vocabulary import read_vocabulary, write_vocabulary
from wgpu_lora.export.merge import F16_MAX, MergedModel
from wgpu_lora.formats.cards import license_of
from wgpu_lora.formats.gguf.layout import file_shape
from wgpu_lora.formats.gguf.types import nbytes, pack
from wgpu_lora.formats.gguf.write import Tensors, check_new_gguf, new_gguf, write_tensors
from wgpu_lora.formats.hub import is_gguf
from wgpu_lora.formats.tensor_names import note_of_skipped
from wgpu_lora.models.config import VECTOR, ModelConfig
from wgpu_lora.models.gguf import gguf_names
from wgpu_lora.names.naming import setting


@dataclass(frozen=True)
class Written:
    """The result of an export: bytes of the file and of its tensors, number of values, and notes on llama.cpp."""

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
    events: Events = SILENT,
) -> Written:
    """Writes a model for llama.cpp.

    Args:
        model: a directory, or a GGUF file. Quantised weights are decoded.
        adapter: a PEFT directory to merge.
        kind: one of `mix.FILE_TYPES`.
        name: general.name; by default, the name of the directory.
        events: receives `written`.

    Raises:
        UserError: a file cannot be read, the adapter does not fit, llama.cpp does not support the model, or `output`
            exists.
    """
    return export_models(model, {kind: output}, adapter, name, events)[kind]


def export_models(
    model: Path,
    outputs: Mapping[str, Path],
    adapter: Path | None = None,
    name: str | None = None,
    events: Events = SILENT,
) -> dict[str, Written]:
    """Writes files of several kinds, reading and merging each tensor once.

    Args:
        outputs: a file by kind, one of `mix.FILE_TYPES`.

    The other arguments, and errors, are those of `export_model`. Files appear one after the other, at the end.
    """
    for kind in outputs:
        if kind not in mix.FILE_TYPES:
            raise UserError(f"{setting('quantize', kind)} is not known: choose one of {', '.join(mix.FILE_TYPES)}.")
    for output in outputs.values():
        check_new_gguf(output)
    merged = MergedModel(model, adapter)
    config = merged.config
    check_expressible(config, model)
    vocabulary = read_vocabulary(merged.tokenizer, config, model)
    done = count(1)

    def packed(own: str, targets: Sequence[GGMLQuantizationType]) -> Iterator[list[np.ndarray]]:
        item = config.parameters[own]
        for rows in merged.pieces(own, item.layout.row_index(item.shape[0])):
            values = item.layout.written(rows.reshape(len(rows), *file_shape(item.shape)[1:]))
            if not np.isfinite(values).all():
                raise UserError(f"{own} has values that are too large for a GGUF file: write the model with merge.")
            for target in targets:
                _check_range(values, own, target)
            of_type = {target: pack(values, target) for target in dict.fromkeys(targets)}
            yield [of_type[target] for target in targets]
        events.written(own, next(done), len(merged.shapes))

    form, names, tensors = config.gguf(), gguf_names(config), Tensors()
    for own, shape in merged.shapes.items():
        stored, targets = file_shape(shape), [GGMLQuantizationType.F32] * len(outputs)
        if config.parameters[own].kind != VECTOR:
            targets = [mix.tensor_type(config, kind, names[own], stored) for kind in outputs]
        tensors[names[own]] = (stored, targets, partial(packed, own, targets))
    for stated, values in form.tensors(config).items():
        whole = [values] * len(outputs)
        tensors[stated] = (values.shape, [GGMLQuantizationType.F32] * len(outputs), partial(iter, [whole]))
    total = sum(prod(shape) for shape in merged.shapes.values())
    finetune = adapter.absolute().name if adapter else ""
    own_name = name or (model.absolute().stem if is_gguf(model) else model.absolute().name)
    with ExitStack() as stack:
        writers = [stack.enter_context(new_gguf(output, form.name)) for output in outputs.values()]
        for writer, kind in zip(writers, outputs, strict=True):
            _write_general(writer, model, own_name, mix.FILE_TYPES[kind].number, total, finetune)
            form.write(config, writer)
            write_vocabulary(writer, vocabulary)
        write_tensors(writers, tensors)
    others = merged.beside.specs()
    notes = (*form.notes(config), *vocabulary.notes, *([note_of_skipped(others)] if others else []))
    found = {}
    for number, (kind, output) in enumerate(outputs.items()):
        tensor_bytes = sum(nbytes(shape, targets[number]) for shape, targets, _ in tensors.values())
        found[kind] = Written(output.stat().st_size, tensor_bytes, total, notes)
    return found


def check_expressible(config: ModelConfig, model: Path) -> None:
    """Raises UserError if llama.cpp would not load the model, or compute something else."""
    form = config.gguf()
    reason = form.refusal(config)
    if reason:
        raise UserError(f"{model} has {reason}, which llama.cpp's {form.name} does not support: write it with merge.")


def _write_general(
    writer: GGUFWriter, model: Path, name: str, file_type: LlamaFileType, parameters: int, finetune: str
) -> None:
    """Writes the metadata general.*; `finetune` is the name of the adapter, or empty."""
    writer.add_type("model")
    writer.add_name(name)
    writer.add_finetune(finetune)
    if license := license_of(model):
        writer.add_license(license)
    writer.add_size_label(size_label(parameters, parameters, 0, 0))
    writer.add_file_type(file_type)
    writer.add_quantization_version(GGML_QUANT_VERSION)


def _check_range(values: np.ndarray, name: str, target: GGMLQuantizationType) -> None:
    """Raises UserError if a value is out of the range of f16, which all types except F32 are based on."""
    if target != GGMLQuantizationType.F32 and np.abs(values).max(initial=0) > F16_MAX:
        raise UserError(f"{name} has values beyond {F16_MAX:,.0f}, the limit of a GGUF matrix: write it with merge.")
