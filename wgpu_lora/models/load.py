"""Streams a checkpoint onto the device. Matrices are uploaded piece by piece and packed there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from wgpu_lora.formats.checkpoint import Checkpoint, WeightSource
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import allocate, release
from wgpu_lora.models.audit import AuditedSource
from wgpu_lora.models.config import ModelConfig
from wgpu_lora.models.decoder import Decoder
from wgpu_lora.weights.base import Loading, scratch_bytes, write
from wgpu_lora.weights.dense import DTYPES


def table_dtype(checkpoint: WeightSource, config: ModelConfig) -> str:
    """The dtype that the embedding is stored in, in the file and on the device."""
    return DTYPES[checkpoint.dtype(config.EMBEDDING)]


def load_weights(
    device: Device,
    checkpoint: WeightSource,
    model: Decoder,
    progress: Callable[[str], None] = lambda name: None,
    importance: Mapping[str, np.ndarray] | None = None,
) -> str:
    """Allocates the model's tensors and fills them; returns the SHA-256 of their values (see AuditedSource).

    Args:
        progress: called with each tensor's name once it is loaded.
        importance: of the inputs of matrices that are quantised (see `weights.base.Loading`).

    Raises:
        NotFiniteError: a tensor has NaN or infinite values.
        UserError: a file is damaged.
    """
    try:
        with (
            ThreadPoolExecutor(1, "digests") as pool,
            AuditedSource(checkpoint) as audited,
            Loading(device, model.weights(), importance) as loading,
        ):
            whole = pool.submit(checkpoint.check_digests) if isinstance(checkpoint, Checkpoint) else None
            _fill(loading, audited, model, progress)
            digest = audited.digest()
            if whole:
                whole.result()
            return digest
    except BaseException:
        release(device, model.storages())
        raise


def _fill(loading: Loading, checkpoint: WeightSource, model: Decoder, progress: Callable[[str], None]) -> None:
    device = loading.device
    allocate(device, model.storages())
    for name, tensor in model.vectors():
        write(device, tensor, checkpoint.read_f32(name) + np.float32(model.config.parameters[name].offset))
        progress(name)
    for name, weight in model.matrices():
        weight.load(loading, checkpoint, name)
        progress(name)


def tensor_count(model: Decoder) -> int:
    """How many times `load_weights` calls `progress`."""
    return len(list(model.vectors())) + len(list(model.matrices()))


def staging_bytes(model: Decoder) -> int:
    """Device memory in bytes that loading needs besides the model."""
    return scratch_bytes(model.weights())
