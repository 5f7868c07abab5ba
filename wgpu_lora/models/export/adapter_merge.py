"""Merges an adapter into its base, W + scale B A, with DoRA's magnitudes, and writes the model tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import ml_dtypes
import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Events
from wgpu_lora.files.atomic import new_directory
from wgpu_lora.files.json_files import read_json
from wgpu_lora.formats.gguf.gguf_layout import read_rows_in_order
from wgpu_lora.formats.hub import is_gguf
from wgpu_lora.formats.model_cards import CARD, card_of_merged
from wgpu_lora.formats.safetensors_checkpoint import PackedCheckpoint
from wgpu_lora.formats.safetensors_writer import MAX_SHARD_BYTES, TensorSpec, copy_companions, write_shards
from wgpu_lora.formats.tokenizer.tokenizer_files import OWN_TOKENIZER, adapter_tokenizer, copy_tokenizer
from wgpu_lora.models.adapter_modules import read_adapter_for
from wgpu_lora.models.export.model_directory import DecodedCheckpoint, SourceDirectory, update_config, write_companions
from wgpu_lora.models.model_config import VECTOR, ModelConfig
from wgpu_lora.models.model_files import read_model
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.weights.base_formats import base_format

DTYPES = {"bf16": ("BF16", ml_dtypes.bfloat16), "f16": ("F16", np.float16), "f32": ("F32", np.float32)}
TORCH = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
F16_MAX = 65504.0
PIECE = 8 << 20  # values in memory at a time


class MergedModel:
    """A model's tensors with an adapter's products added, read as float32, a few rows at a time.

    Args:
        model: a directory, or a GGUF file. Quantised weights are decoded.
        adapter: a PEFT directory.

    Raises:
        UserError: a file cannot be read, the adapter does not fit, or, while reading, a value is not finite.
    """

    def __init__(self, model: Path, adapter: Path | None = None):
        files = read_model(model)
        self.config, self.tokenizer = replace(files.config, packed=None), files.tokenizer
        if adapter and files.tokenizer:
            self.tokenizer = adapter_tokenizer(files.tokenizer, files.config.vocab_size, adapter)
        self.notes = [] if self.tokenizer is files.tokenizer else [OWN_TOKENIZER.format(adapter)]
        source = files.checkpoint
        self.source_files = SourceDirectory(source)
        self._checkpoint = DecodedCheckpoint(source) if isinstance(source, PackedCheckpoint) else source
        self._deltas = scaled_factors(adapter, self.config, model) if adapter else {}
        self.shapes = self.config.parameter_shapes()
        # Vectors in float32 beside matrices that are not.
        dtypes = {name: source.dtype(name) for name in self.shapes}
        mixed = dtypes[self.config.EMBEDDING] != "F32"
        vectors = (name for name, item in self.config.parameters.items() if item.kind == VECTOR)
        self.wide = {name for name in vectors if mixed and dtypes[name] == "F32"}

    def pieces(self, name: str, order: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """Yields the tensor's rows, float32 [rows, ...], some at a time; a one-dimensional tensor as a whole.

        Args:
            order: the numbers of the rows in the order in which they are wanted.
        """
        shape = self.shapes[name]
        if len(shape) == 1:
            values = self._checkpoint.read_f32(name)
            check_finite(values, name)
            yield values if order is None else values[order]
            return
        step = max(1, PIECE // int(np.prod(shape[1:], dtype=np.int64)))
        for start in range(0, shape[0], step):
            rows = np.arange(start, min(start + step, shape[0])) if order is None else order[start : start + step]
            values = read_rows_in_order(partial(self._checkpoint.read_f32, name), rows)
            if name in self._deltas:
                a, b, *magnitude = self._deltas[name]
                with np.errstate(over="ignore", invalid="ignore"):  # check_finite reports it
                    values = values + b[rows] @ a
                    if magnitude:
                        norms = np.sqrt(np.einsum("oi,oi->o", values, values, dtype=np.float64))
                        gain = np.divide(magnitude[0][rows], norms, out=np.ones(len(norms)), where=norms != 0)
                        values = values * gain.astype(np.float32)[:, None]
            check_finite(values, name)
            yield values


def check_finite(values: np.ndarray, name: str) -> None:
    """Raises UserError if a value is NaN or infinite."""
    if not np.isfinite(values).all():
        raise UserError(f"{name} has values that are not finite: train the adapter again, or use another model.")


def scaled_factors(adapter: Path, config: ModelConfig, model: Path) -> dict[str, tuple[np.ndarray, ...]]:
    """An adapter's A [r, in] and scale B [out, r], by the name of the weight that they are merged into.

    With DoRA, the magnitudes [out] follow.

    Raises:
        UserError: the adapter cannot be read, or does not fit the model.
    """
    adapter_config, matrices = read_adapter_for(config, adapter, str(model))
    return {
        f"{module}.weight": (a, np.float32(adapter_config.scaling(module)) * b, *magnitude)
        for module, (a, b, *magnitude) in matrices.items()
    }


def trained_base_dtype(adapter: Path) -> str | None:
    """The base format that rounded the weights which an adapter was trained beside, by its records; None without."""
    for name in ("run.json", "metadata.json"):
        try:
            options = read_json(adapter / name).get("options")
            base_dtype = str(options.get("base_dtype")) if isinstance(options, dict) else ""
            return base_dtype if base_format(base_dtype).bits < 16 else None
        except UserError:  # records are optional, and untrusted
            continue
    return None


def rounding_note(base_dtype: str) -> str:
    """A sentence about the model that an adapter was merged into. base_dtype: see `trained_base_dtype`."""
    return (
        f"the adapter was trained beside weights in {base_dtype}; in the merged model they are unrounded, or decoded, "
        f"and quantising it rounds them a second time: 'merge' and 'quantize' measure with {flag('eval_data')} what "
        f"that costs, and {flag('adapter')} with {setting('base_dtype', base_dtype)} has none of it"
    )


def merge_adapter(
    model: Path,
    adapter: Path,
    output: Path,
    dtype: str = "bf16",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    name: str | None = None,
    events: Events = SILENT,
) -> list[str]:
    """Writes base plus adapter, computed in float32, as a Hugging Face model directory; returns notes for the user.

    Args:
        model: the base: a directory, or a GGUF file. Quantised weights are decoded.
        dtype: bf16, f16 or f32, of every tensor of the language model, except that vectors which the base keeps in
            float32 beside matrices of 16 bits, such as the decay rates of delta nets, stay so. Those of other parts are
            copied.
        name: of the base in the model card, such as a hub id.
        events: receives `written`.

    Raises:
        UserError: a file cannot be read, the adapter does not fit, `output` exists, or a value is out of f16's range.
    """
    if dtype not in DTYPES:
        raise UserError(f"{setting('dtype', dtype)} is not known: choose one of {', '.join(DTYPES)}.")
    merged = MergedModel(model, adapter)
    kinds = {name: DTYPES["f32" if name in merged.wide else dtype] for name in merged.shapes}
    counter, other_specs = count(1), merged.source_files.specs()
    model_names = {merged.source_files.stored_name(name): name for name in merged.shapes}

    def pieces(tensor: str) -> Iterator[np.ndarray]:
        if tensor in other_specs:
            yield from merged.source_files.pieces(tensor)
            return
        name = model_names[tensor]
        for values in merged.pieces(name):
            kind, numpy_type = kinds[name]
            if kind == "F16" and np.abs(values).max(initial=0) > F16_MAX:
                raise UserError(
                    f"{name} has values beyond f16's range of {F16_MAX:,.0f}: use {setting('dtype', 'bf16')} or f32."
                )
            # As bits, because NumPy does not support bfloat16 buffers.
            yield values.astype(numpy_type).view(np.uint8)
        events.written(name, next(counter), len(merged.shapes))

    with new_directory(output, flag("output")) as directory:
        copy_companions(model, directory)
        if is_gguf(model):
            write_companions(model, merged.tokenizer, directory)
        elif merged.notes:
            copy_tokenizer(adapter, directory)
        specs = {tensor: TensorSpec(kinds[name][0], merged.shapes[name]) for tensor, name in model_names.items()}
        write_shards(directory, specs | other_specs, pieces, max_shard_bytes)
        base_dtype = trained_base_dtype(adapter)  # for whoever quantises the result
        update_config(directory, TORCH[dtype], quantization_config=None, adapter_base_dtype=base_dtype)
        (directory / CARD).write_text(card_of_merged(name or str(model), adapter, dtype), encoding="utf-8")
    return merged.notes
