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
from gguf import GGML_QUANT_SIZES, GGML_QUANT_VERSION, GGMLQuantizationType, GGUFWriter, Keys, LlamaFileType, size_label

from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Events
from wgpu_lora.formats.gguf.gguf_layout import file_shape
from wgpu_lora.formats.gguf.gguf_writer import Pieces, Tensors, check_new_gguf, nbytes, new_gguf, pack, write_tensors
from wgpu_lora.formats.hub import is_gguf
from wgpu_lora.formats.model_cards import license_of
from wgpu_lora.formats.peft_adapter import read_adapter
from wgpu_lora.formats.safetensors_checkpoint import note_of_skipped
from wgpu_lora.models.export.adapter_merge import (
    F16_MAX,
    MergedModel,
    check_finite,
    rounding_note,
    scaled_factors,
    trained_base_dtype,
)
from wgpu_lora.models.export.gguf_vocabulary import read_vocabulary, write_vocabulary
from wgpu_lora.models.model_config import VECTOR, ModelConfig
from wgpu_lora.models.model_files import config_of, gguf_names
from wgpu_lora.names.spelling import setting


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
        if kind not in FILE_TYPES:
            raise UserError(f"{setting('quantize', kind)} is not known: choose one of {', '.join(FILE_TYPES)}.")
    for output in outputs.values():
        check_new_gguf(output)
    merged = MergedModel(model, adapter)
    config = merged.config
    check_expressible(config, model)
    vocabulary = read_vocabulary(merged.tokenizer, config, model)
    counter = count(1)

    def packed(parameter: str, targets: Sequence[GGMLQuantizationType]) -> Iterator[list[np.ndarray]]:
        item = config.parameters[parameter]
        for rows in merged.pieces(parameter, item.layout.row_index(item.shape[0])):
            values = item.layout.file_rows(rows.reshape(len(rows), *file_shape(item.shape)[1:]))
            if not np.isfinite(values).all():
                raise UserError(
                    f"{parameter} has values that are too large for a GGUF file: write the model with merge."
                )
            for target in targets:
                _check_range(values, parameter, target)
            of_type = {target: pack(values, target) for target in dict.fromkeys(targets)}
            yield [of_type[target] for target in targets]
        events.written(parameter, next(counter), len(merged.shapes))

    form, names, tensors = config.gguf(), gguf_names(config), Tensors()
    for parameter, shape in merged.shapes.items():
        dims, targets = file_shape(shape), [GGMLQuantizationType.F32] * len(outputs)
        if config.parameters[parameter].kind != VECTOR:
            targets = [tensor_type(config, kind, names[parameter], dims) for kind in outputs]
        tensors[names[parameter]] = (dims, targets, partial(packed, parameter, targets))
    for tensor, values in form.tensors(config).items():
        whole = [values] * len(outputs)
        tensors[tensor] = (values.shape, [GGMLQuantizationType.F32] * len(outputs), partial(iter, [whole]))
    total = sum(prod(shape) for shape in merged.shapes.values())
    finetune = adapter.absolute().name if adapter else ""
    general_name = name or (model.absolute().stem if is_gguf(model) else model.absolute().name)
    with ExitStack() as stack:
        writers = [stack.enter_context(new_gguf(output, form.name)) for output in outputs.values()]
        for writer, kind in zip(writers, outputs, strict=True):
            _write_general(writer, model, general_name, FILE_TYPES[kind].number, total, finetune)
            form.write(config, writer)
            write_vocabulary(writer, vocabulary)
        write_tensors(writers, tensors)
    other_parts = merged.source_files.specs()
    base_dtype = trained_base_dtype(adapter) if adapter else None
    notes = (
        *merged.notes,
        *form.notes(config),
        *vocabulary.notes,
        *([note_of_skipped(other_parts)] if other_parts else []),
        *([rounding_note(base_dtype)] if base_dtype else []),
    )
    result = {}
    for number, (kind, output) in enumerate(outputs.items()):
        tensor_bytes = sum(nbytes(shape, targets[number]) for shape, targets, _ in tensors.values())
        result[kind] = Written(output.stat().st_size, tensor_bytes, total, notes)
    return result


def check_expressible(config: ModelConfig, model: Path) -> None:
    """Raises UserError if llama.cpp would not load the model, or compute something else."""
    form = config.gguf()
    reason = form.unsupported_feature(config)
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


Q = GGMLQuantizationType


@dataclass(frozen=True)
class FileType:
    """A quantisation of GGUF files: its number in the metadata, and the type of most matrices."""

    number: LlamaFileType
    base_type: GGMLQuantizationType


FILE_TYPES = {
    "f16": FileType(LlamaFileType.MOSTLY_F16, Q.F16),
    "q8_0": FileType(LlamaFileType.MOSTLY_Q8_0, Q.Q8_0),
    "q4_0": FileType(LlamaFileType.MOSTLY_Q4_0, Q.Q4_0),
    "q4_1": FileType(LlamaFileType.MOSTLY_Q4_1, Q.Q4_1),
    "q5_0": FileType(LlamaFileType.MOSTLY_Q5_0, Q.Q5_0),
    "q5_1": FileType(LlamaFileType.MOSTLY_Q5_1, Q.Q5_1),
    "q4_k_m": FileType(LlamaFileType.MOSTLY_Q4_K_M, Q.Q4_K),
    "q5_k_m": FileType(LlamaFileType.MOSTLY_Q5_K_M, Q.Q5_K),
    "q6_k": FileType(LlamaFileType.MOSTLY_Q6_K, Q.Q6_K),
}
# Types for rows that are not whole super-blocks of 256 values.
SHORT_ROWS = {Q.Q4_K: Q.Q5_0, Q.Q5_K: Q.Q5_1, Q.Q6_K: Q.Q8_0}


def tensor_type(config: ModelConfig, kind: str, name: str, shape: tuple[int, ...]) -> GGMLQuantizationType:
    """The type of the tensor with this GGUF name. kind: one of FILE_TYPES. Vectors are always F32."""
    if len(shape) == 1:
        return Q.F32
    base_type = FILE_TYPES[kind].base_type
    return base_type if base_type == Q.F16 else _for_rows(_tensor_type(config, kind, base_type, name), shape[1])


def _tensor_type(config: ModelConfig, kind: str, base_type: GGMLQuantizationType, name: str) -> GGMLQuantizationType:
    if name == "output.weight" or (name == "token_embd.weight" and config.tie_word_embeddings):
        return Q.Q8_0 if base_type == Q.Q8_0 else Q.Q6_K
    if kind not in ("q4_k_m", "q5_k_m") or not name.startswith("blk."):
        return base_type
    _, layer, module, _ = name.split(".")
    if module in ("attn_v", "attn_qkv", "ffn_down") and _gets_finer_type(int(layer), config.num_hidden_layers):
        return Q.Q6_K
    return Q.Q5_K if module == "attn_v" and base_type == Q.Q4_K and config.gguf().widens_values(config) else base_type


def _gets_finer_type(layer: int, layers: int) -> bool:
    """Whether a layer gets a finer type: the first and last eighth of the layers, and every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _for_rows(kind: GGMLQuantizationType, columns: int) -> GGMLQuantizationType:
    if columns % GGML_QUANT_SIZES[kind][0]:
        kind = SHORT_ROWS.get(kind, kind)
    return Q.F16 if columns % GGML_QUANT_SIZES[kind][0] else kind


def export_adapter(model: Path, adapter: Path, output: Path) -> Written:
    """Writes an adapter's factors in float32. Only the config of `model` is read.

    Raises:
        UserError: the config or the adapter cannot be read, they do not fit, the adapter is a DoRA, or `output` exists.
    """
    check_new_gguf(output)
    config = config_of(model)
    check_expressible(config, model)
    adapter_config, _ = read_adapter(adapter)
    if adapter_config.use_dora:
        raise UserError(
            f"The adapter {adapter} is a DoRA, which llama.cpp does not apply: merge it into its model, and export "
            "that."
        )
    alpha = np.float32(adapter_config.lora_alpha)
    form, names, tensors, count = config.gguf(), gguf_names(config), Tensors(), 0
    for parameter, (a, b, *_) in scaled_factors(adapter, config, model).items():
        # llama.cpp multiplies B A by alpha / rank, with the same alpha for all modules. This adapter's scaling may
        # differ (rsLoRA, patterns), so B is stored scaled and divided by alpha / rank.
        factor_b = b * np.float32(len(a) / alpha)
        layout = config.parameters[parameter].layout
        columns = layout.column_index(a.shape[1])
        factor_a = a if columns is None else a[:, columns]
        factor_b = factor_b[layout.row_index(len(factor_b))]
        for letter, factor in (("a", factor_a), ("b", factor_b)):
            check_finite(factor, f"lora_{letter} of {parameter}")
            tensors[f"{names[parameter]}.lora_{letter}"] = (factor.shape, [GGMLQuantizationType.F32], _whole(factor))
            count += factor.size
    with new_gguf(output, form.name) as writer:
        writer.add_type("adapter")
        writer.add_name(adapter.absolute().name)
        writer.add_string(Keys.Adapter.TYPE, "lora")
        writer.add_float32(Keys.Adapter.LORA_ALPHA, float(alpha))
        write_tensors([writer], tensors)
    return Written(output.stat().st_size, 4 * count, count)


def _whole(factor: np.ndarray) -> Pieces:
    def pieces() -> Iterator[list[np.ndarray]]:
        yield [np.ascontiguousarray(factor, np.float32)]

    return pieces
