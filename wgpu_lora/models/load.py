"""Streams a checkpoint onto the device: a matrix is uploaded piece by piece and packed there, never held whole."""

from __future__ import annotations

from collections.abc import Callable

from wgpu_lora.formats.checkpoint import WeightSource
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import allocate, release
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.models.audit import AuditedSource
from wgpu_lora.models.config import LINEAR_PATHS
from wgpu_lora.models.decoder import Decoder
from wgpu_lora.weights.base import Loading, Weight, scratch_bytes
from wgpu_lora.weights.dense import DTYPES

Progress = Callable[[str], None]


def table_dtype(checkpoint: WeightSource) -> str:
    """The type that the embedding is stored in, and kept in."""
    return DTYPES[checkpoint.dtype("model.embed_tokens.weight")]


def load_weights(
    device: Device, checkpoint: WeightSource, model: Decoder, progress: Progress = lambda name: None
) -> str:
    """Allocates the model's tensors and fills them; returns the SHA-256 of their values (see AuditedSource).

    Args:
        progress: called with each tensor's name once it is loaded.

    Raises:
        NotFiniteError: a tensor, by name, holds NaN or infinity. UserError: a file is damaged.
    """
    try:
        with AuditedSource(checkpoint) as audited, Loading(device, model.weights()) as loading:
            _fill(loading, audited, model, progress)
            return audited.digest()
    except BaseException:
        release(device, model.storages())
        raise


def _fill(loading: Loading, checkpoint: WeightSource, model: Decoder, progress: Progress) -> None:
    device = loading.device
    allocate(device, model.storages())

    def vector(name: str, tensor: Tensor) -> None:
        device.write(tensor.storage.buffer, checkpoint.read_f32(name))
        progress(name)

    def matrix(name: str, weight: Weight) -> None:
        weight.load(loading, checkpoint, name)
        progress(name)

    matrix("model.embed_tokens.weight", model.embedding)
    if model.head is not model.embedding:
        matrix("lm_head.weight", model.head)
    vector("model.norm.weight", model.final_norm)
    for i, layer in enumerate(model.layers):
        prefix = f"model.layers.{i}."
        for name, norm in layer.norms.items():
            vector(f"{prefix}{name}.weight", norm)
        for module, item in layer.linears.items():
            path = f"{prefix}{LINEAR_PATHS[module]}"
            if item.bias:
                vector(f"{path}.bias", item.bias)
            matrix(f"{path}.weight", item.weight)


def tensor_count(model: Decoder) -> int:
    """How many tensors loading names, one after the other."""
    of_layers = sum(
        len(layer.norms) + sum(1 + bool(item.bias) for item in layer.linears.values()) for layer in model.layers
    )
    return 2 + (model.head is not model.embedding) + of_layers


def staging_bytes(model: Decoder) -> int:
    """Bytes that loading holds on the device beside the model itself."""
    return scratch_bytes(model.weights())
