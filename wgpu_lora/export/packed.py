"""A model packed to NF4 on the device, written as bitsandbytes stores it: quantised once, then loaded as it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from wgpu_lora.bounded import read_json
from wgpu_lora.errors import UserError
from wgpu_lora.export.companions import write_companions
from wgpu_lora.formats.bitsandbytes import KIND, QUANTIZATION_CONFIG, STATE, stored_parts
from wgpu_lora.formats.checkpoint import Checkpoint
from wgpu_lora.formats.gguf.checkpoint import GGUFCheckpoint
from wgpu_lora.formats.hub import is_gguf
from wgpu_lora.formats.shards import MAX_SHARD_BYTES, TensorSpec, new_model_directory, write_shards
from wgpu_lora.models.loaded import LoadedModel

TORCH = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
SAFETENSORS = {np.dtype(np.uint8): "U8", np.dtype(np.float32): "F32"}


def write_packed(
    model: LoadedModel,
    output: Path,
    progress: Callable[[str], None] = lambda name: None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a model, its linears in NF4 as the device packed them, into a directory that we and transformers load.

    Everything else keeps its type. The model's weights are loaded if they are not yet.

    Args:
        progress: called with each tensor's name once it is written.

    Raises:
        UserError: the model is not kept in NF4, is stored packed already, or `output` is in use.
    """
    checkpoint = model.checkpoint
    kept = model.config.packed is None and model.decoder.base_dtype == KIND
    if not isinstance(checkpoint, Checkpoint | GGUFCheckpoint) or not kept:
        raise UserError(f"{model.name} is not a model that is packed on loading: give one in full precision, as NF4.")
    model.load_weights()
    linears = model.config.matrices()
    packed = {name: weight for name, weight in model.decoder.matrices() if name in linears}
    parts: dict[str, np.ndarray] = {}

    def of(name: str) -> dict[str, np.ndarray]:
        """The stored tensors of one packed matrix; those of the last are kept, since they are asked for one by one."""
        if name not in parts:
            parts.clear()
            found = packed[name].packed(model.device)
            assert found, f"{name} is kept as it is stored"
            parts.update(stored_parts(name, found, TORCH[checkpoint.dtype(name)]))
        return parts

    specs: dict[str, TensorSpec] = {}
    matrix_of: dict[str, str] = {}
    for name in model.config.parameter_shapes():
        if name in packed:
            for part, values in of(name).items():
                specs[part], matrix_of[part] = TensorSpec(SAFETENSORS[values.dtype], values.shape), name
        elif name in checkpoint.names():
            specs[name] = TensorSpec(checkpoint.dtype(name), checkpoint.shape(name))

    def pieces(name: str) -> Iterator[np.ndarray]:
        if name in matrix_of:
            yield of(matrix_of[name])[name].view(np.uint8)
            if name.endswith(STATE):
                progress(matrix_of[name])
        else:
            yield checkpoint.read_raw(name)
            progress(name)

    with new_model_directory(output, model.path) as directory:
        if is_gguf(model.path):
            write_companions(model.path, model.tokenizer, directory)
        write_shards(directory, specs, pieces, max_shard_bytes)
        stated = read_json(directory / "config.json") | {"quantization_config": QUANTIZATION_CONFIG}
        (directory / "config.json").write_text(json.dumps(stated, indent=2) + "\n")
