"""W + scale B A: an adapter merged into its base, written as a model of its own, never held whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.formats.checkpoint import Checkpoint
from wgpu_lora.formats.peft import module_path, read_adapter
from wgpu_lora.formats.shards import MAX_SHARD_BYTES, TensorSpec, new_model_directory, write_shards
from wgpu_lora.models.config import ModelConfig, read_json

DTYPES = {"bf16": ("BF16", ml_dtypes.bfloat16), "f16": ("F16", np.float16), "f32": ("F32", np.float32)}
TORCH = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
F16_MAX = 65504.0
PIECE = 8 << 20  # values in memory at a time


def merge_adapter(
    model: Path,
    adapter: Path,
    output: Path,
    dtype: str = "bf16",
    progress: Callable[[str], None] = lambda name: None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes base plus adapter, as computed in float32, into a Hugging Face directory that transformers loads.

    Args:
        model: the base's directory, in full precision. dtype: bf16, f16 or f32, of every tensor.
        progress: called with each tensor's name once it is written.

    Raises:
        UserError: the model or the adapter cannot be read, they do not fit, `output` is in use, or a value is beyond
            f16's range.
    """
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype} is not known: choose one of {', '.join(DTYPES)}.")
    config, checkpoint = ModelConfig.load(model), Checkpoint(model)
    if config.packed:
        raise UserError(f"The linears of {model} are stored in NF4: merge into the model that it was made from.")
    checkpoint.check_against(config)
    adapter_config, matrices = read_adapter(adapter)
    shapes = config.linear_shapes()
    deltas: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for (layer, module), (a, b) in matrices.items():
        path = module_path(layer, module)
        if layer >= config.num_hidden_layers or (b.shape[0], a.shape[1]) != shapes[module]:
            raise UserError(f"The adapter {adapter} does not fit {model}: {path} differs in shape.")
        deltas[f"{path}.weight"] = (a, np.float32(adapter_config.scaling(path)) * b)
    kind, numpy_type = DTYPES[dtype]
    names = [name for name in config.parameter_shapes() if name in checkpoint]

    def pieces(name: str) -> Iterator[np.ndarray]:
        shape = checkpoint.shape(name)
        step = max(1, PIECE // int(np.prod(shape[1:], dtype=np.int64)))
        for start in range(0, shape[0], step):
            stop = min(start + step, shape[0])
            values = checkpoint.read_f32(name, start, stop)
            if name in deltas:
                a, b = deltas[name]
                values = values + b[start:stop] @ a
            if dtype == "f16" and np.abs(values).max(initial=0) > F16_MAX:
                raise UserError(f"{name} has values beyond f16's range of {F16_MAX:,.0f}: use --dtype bf16 or f32.")
            # Bits, because NumPy has no buffer of bfloat16.
            yield values.astype(numpy_type).view(np.uint8)
        progress(name)

    with new_model_directory(output, model) as directory:
        specs = {name: TensorSpec(kind, checkpoint.shape(name)) for name in names}
        write_shards(directory, specs, pieces, max_shard_bytes)
        stated = read_json(model / "config.json")
        stated["dtype" if "dtype" in stated else "torch_dtype"] = TORCH[dtype]
        (directory / "config.json").write_text(json.dumps(stated, indent=2) + "\n")
