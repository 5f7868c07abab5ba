"""What the tests against llama.cpp share: its answers, and transformers' on the same weights."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

from wgpu_lora.formats.gguf.gguf_layout import file_shape
from wgpu_lora.models.architectures import load_config
from wgpu_lora.models.model_files import gguf_names


def opened(path: Path, context: int = 512, **options: Any) -> llama_cpp.Llama:
    """llama.cpp on one thread, with logits of every token."""
    return llama_cpp.Llama(
        str(path), n_ctx=context, n_batch=context, logits_all=True, verbose=False, n_threads=1, **options
    )


def llama_logits(path: Path, ids: Sequence[int], **options: Any) -> np.ndarray:
    """[tokens, vocabulary] as llama.cpp computes them."""
    model = opened(path, **options)
    try:
        model.eval(list(ids))
        return np.array(model.scores[: len(ids)])
    finally:
        model.close()


def reference_logits(directory: Path, ids: Sequence[int]) -> np.ndarray:
    """[tokens, vocabulary] as transformers computes them in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.tensor([list(ids)])).logits[0].numpy()


def dequantized(path: Path, model: Path, directory: Path) -> Path:
    """The values that a GGUF file of `model` holds, by the gguf package, as a model that transformers loads."""
    shutil.copytree(model, directory)
    config = load_config(model)
    gguf_tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    tensors, names = {}, gguf_names(config)
    for name, item in config.parameters.items():
        tensor, layout = gguf_tensors[names[name]], item.layout
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(file_shape(item.shape))
        values = layout.columns_back(layout.values(values))[np.argsort(layout.row_index(len(values)))]
        tensors[name] = np.ascontiguousarray(values.reshape(item.shape))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def tensor_types(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


def loss(logits: np.ndarray, ids: Sequence[int]) -> float:
    """Mean negative log-likelihood of each token after the first."""
    shifted = logits[:-1].astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    target_logits = shifted[np.arange(len(ids) - 1), list(ids)[1:]]
    return float((np.log(np.exp(shifted).sum(axis=1)) - target_logits).mean())


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square of the difference, as a share of the expected values' spread."""
    return float(np.sqrt(np.mean((actual - expected) ** 2)) / expected.std())


def choices_agree(actual: np.ndarray, expected: np.ndarray, near: float) -> bool:
    """Whether the greedy token is the same wherever the expected lead is more than `near` of the logits' spread."""
    top = np.sort(expected, axis=1)
    decided = top[:, -1] - top[:, -2] > near * expected.std()
    assert decided.mean() > 0.15  # else the models are too undecided for this to say anything
    return bool((actual.argmax(1) == expected.argmax(1))[decided].all())
