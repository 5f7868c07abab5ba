"""Writes a model as it was quantised on the device, in its base format's packed form, which loads as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Events
from wgpu_lora.files.atomic import new_directory
from wgpu_lora.formats.gguf.gguf_checkpoint import GGUFCheckpoint
from wgpu_lora.formats.hub import is_gguf
from wgpu_lora.formats.safetensors_checkpoint import ARRAYS, Checkpoint
from wgpu_lora.formats.safetensors_writer import MAX_SHARD_BYTES, TensorSpec, copy_companions, write_shards
from wgpu_lora.models.export.model_directory import DecodedCheckpoint, SourceDirectory, update_config, write_companions
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.names.spelling import flag
from wgpu_lora.weights.base import Packed, PackedForm
from wgpu_lora.weights.base_formats import packed_form
from wgpu_lora.weights.lowbit.lowbit_layout import ATTENTION

TORCH = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
SAFETENSORS = {dtype: name for name, dtype in ARRAYS.items()}


def write_packed(
    model: LoadedModel,
    output: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    events: Events = SILENT,
    instead: Mapping[str, Callable[[], Packed]] | None = None,
    replace: bool = False,
) -> None:
    """Writes a model with its linear layers packed, as a directory that this package and others load.

    Other tensors keep their dtype. The model's weights are loaded if necessary.

    Args:
        events: receives `loading` and `written`.
        instead: what is written for some matrices, by name, instead of what is on the device. The model may then be
            packed already.
        replace: whether a job, which has locked the place, replaces an earlier output.

    Raises:
        UserError: the model's base format has no packed form, its file is already quantised, or `output` exists.
    """
    checkpoint = model.checkpoint
    form = packed_form(model.decoder.base_dtype)
    if not isinstance(checkpoint, Checkpoint | GGUFCheckpoint | DecodedCheckpoint) or (
        model.config.packed and instead is None
    ):
        raise UserError(f"{model.name} is not quantised on loading: give a model in full precision.")
    # `output` is refused before the weights are loaded.
    with new_directory(output, None if replace else flag("output")) as directory:
        copy_companions(model.path, directory)
        model.load_weights(events)
        if is_gguf(model.path):
            write_companions(model.path, model.tokenizer, directory)
        skip_modules = (*model.config.kept_modules(), *SourceDirectory(checkpoint).modules())
        update_config(
            directory, quantization_config=dict(form.quantization_config(model.decoder.base_dtype, skip_modules))
        )
        _write_weights(model, checkpoint, form, directory, max_shard_bytes, events, instead or {})


def _write_weights(
    model: LoadedModel,
    checkpoint: Checkpoint | GGUFCheckpoint | DecodedCheckpoint,
    form: PackedForm,
    directory: Path,
    max_shard_bytes: int,
    events: Events,
    instead: Mapping[str, Callable[[], Packed]],
) -> None:
    linears, source_files = model.config.matrices(), SourceDirectory(checkpoint)
    packed = {name: weight for name, weight in model.decoder.matrices() if name in linears}
    parts: dict[str, np.ndarray] = {}

    def of(name: str) -> dict[str, np.ndarray]:
        """The stored tensors of a packed matrix. The last matrix is cached, because its tensors are written in turn."""
        if name not in parts:
            parts.clear()
            result = instead[name]() if name in instead else packed[name].packed(model.device)
            assert result, f"{name} is not packed"
            parts.update(form.tensors(name, result, TORCH.get(checkpoint.dtype(name), "bfloat16")))
        return parts

    specs: dict[str, TensorSpec] = {}
    owner: dict[str, str] = {}  # the parameter that a tensor is of
    part_of: dict[str, str] = {}  # the part of a packed matrix that it is
    for name in model.config.parameter_shapes():
        if name in packed:
            for part, values in of(name).items():
                stored_name = source_files.stored_name(part)
                specs[stored_name], owner[stored_name] = TensorSpec(SAFETENSORS[values.dtype], values.shape), name
                part_of[stored_name] = part
        elif name in checkpoint.names():
            stored_name = source_files.stored_name(name)
            specs[stored_name], owner[stored_name] = TensorSpec(checkpoint.dtype(name), checkpoint.shape(name)), name
    last = {name: tensor for tensor, name in owner.items()}
    counter, other_specs = count(1), source_files.specs()

    def pieces(tensor: str) -> Iterator[np.ndarray]:
        if tensor in other_specs:
            yield from source_files.pieces(tensor)
            return
        name = owner[tensor]
        yield of(name)[part_of[tensor]].view(np.uint8) if name in packed else checkpoint.read_raw(name)
        if tensor == last[name]:
            events.written(name, next(counter), len(last))

    write_shards(directory, specs | other_specs, pieces, max_shard_bytes, companions=True)


@dataclass
class QuantizationError:
    """Matrices of one kind of layer.

    bits: per weight, as stored, with tables and scales. error: sum((w - quantised w)^2) / sum(w^2).
    """

    kind: str
    schemes: list[str] = field(default_factory=list)
    matrices: int = 0
    weights: int = 0
    stored: int = 0
    squares: float = 0.0
    lost: float = 0.0

    @property
    def bits(self) -> float:
        return 8 * self.stored / self.weights

    @property
    def error(self) -> float:
        return self.lost / self.squares if self.squares else 0.0


def rounded(model: LoadedModel) -> list[QuantizationError]:
    """The matrices of a model that was quantised while it was loaded, of attention and of the MLP."""
    result: dict[str, QuantizationError] = {}
    linears = model.config.matrices()
    for name, weight in model.decoder.matrices():
        if name not in linears:
            continue
        kind = "attention" if ATTENTION.search(name) else "mlp"
        group = result.setdefault(kind, QuantizationError(kind))
        values, packed = weight.values(model.device), weight.packed(model.device)
        source = model.checkpoint.read_f32(name).astype(np.float64)
        group.schemes = sorted({*group.schemes, weight.format})
        group.matrices, group.weights = group.matrices + 1, group.weights + values.size
        group.stored += sum(part.nbytes for part in packed.read()) if packed else 0
        group.squares += float((source**2).sum())
        group.lost += float(((source - values) ** 2).sum())
    return list(result.values())
