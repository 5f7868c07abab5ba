"""A model with its files resolved and its tensors declared on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import numpy as np

from wgpu_lora.data.tokenizer import Tokenizer
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Events
from wgpu_lora.formats.checkpoint import Checkpoint, WeightSource
from wgpu_lora.formats.gguf.checkpoint import GGUFCheckpoint
from wgpu_lora.formats.hub import resolve_model
from wgpu_lora.formats.tensor_names import note_of_skipped
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import missing_bytes, release
from wgpu_lora.models.config import ModelConfig
from wgpu_lora.models.decoder import Decoder
from wgpu_lora.models.files import read_model
from wgpu_lora.models.load import load_weights, staging_bytes, table_dtype, tensor_count
from wgpu_lora.models.shapes import cut
from wgpu_lora.names.naming import setting
from wgpu_lora.share import claim
from wgpu_lora.share.refusals import advising
from wgpu_lora.weights.registry import DEFAULT_FORMAT, base_format


@dataclass(repr=False)
class LoadedModel:
    """A model for training and inference. Its weights are on `device` once `load_weights` has run.

    path: the model's directory or GGUF file.
    weights_sha256: SHA-256 of all values as read, set by `load_weights`.
    importance: how much the inputs [in] of matrices count if loading quantises them, by the matrices' names.
    """

    name: str
    path: Path
    config: ModelConfig
    checkpoint: WeightSource
    tokenizer: Tokenizer | None
    device: Device
    decoder: Decoder
    weights_loaded: bool = False
    weights_sha256: str | None = None
    importance: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __repr__(self) -> str:
        config, where = self.config, self.device.info.name
        return (
            f"LoadedModel({self.name!r}, {config.architecture}, {config.num_hidden_layers} layers of "
            f"{config.hidden_size}, {self.decoder.base_dtype} weights {'on' if self.weights_loaded else 'not yet on'} "
            f"{where})"
        )

    @property
    def notes(self) -> list[str]:
        """Sentences for the user about what is not used of the model's files."""
        others = self.checkpoint.others if isinstance(self.checkpoint, Checkpoint) else {}
        notes = [note_of_skipped(others)] if others else []
        kinds = self.checkpoint.quantised if isinstance(self.checkpoint, GGUFCheckpoint) else []
        if kinds and self.decoder.base_dtype not in ("bf16", "f16", "f32"):
            notes.append(
                f"the weights in {', '.join(kinds)} are rounded again, to {self.decoder.base_dtype}, which costs "
                f"accuracy: use a file in F16 or BF16, or {setting('base_dtype', 'bf16')} if it fits"
            )
        return notes

    @advising()
    def load_weights(self, events: Events = SILENT) -> None:
        """Streams the weights onto the device, unless they are loaded already.

        Raises:
            UserError: a file is damaged, or the device's memory does not suffice.
        """
        if self.weights_loaded:
            return
        total, done = self.tensors_to_load(), count(1)

        def loaded(tensor: str) -> None:
            events.loading(self.name, tensor, next(done), total)

        with claim(self.device, self.bytes_to_load(), f"the weights of {self.name}"):
            self.weights_sha256 = load_weights(self.device, self.checkpoint, self.decoder, loaded, self.importance)
            self.weights_loaded = True

    def unload(self) -> None:
        """Frees the weights."""
        release(self.device, self.decoder.storages())
        self.weights_loaded = False

    def declared(self, layers: int | None = None) -> LoadedModel:
        """The same model, or its first `layers` layers, with nothing on the device. UserError where it has fewer."""
        config = cut(self.config, layers)
        table = table_dtype(self.checkpoint, config)
        decoder = Decoder.declare(config, self.decoder.base_dtype, table, self.device.max_binding)
        return replace(self, config=config, decoder=decoder, weights_loaded=False)

    def tensors_to_load(self) -> int:
        """How many tensors `load_weights` loads."""
        return 0 if self.weights_loaded else tensor_count(self.decoder)

    def bytes_to_load(self) -> int:
        """Device memory in bytes that `load_weights` needs at most."""
        if self.weights_loaded:
            return 0
        return missing_bytes(self.decoder.storages()) + staging_bytes(self.decoder)


def open_model(model: str, device: Device | str | int | None = None, base_dtype: str = DEFAULT_FORMAT) -> LoadedModel:
    """Reads a model's files and declares its tensors, without allocating them.

    Args:
        model: a directory, a GGUF file, a hub id, or `demo`.
        device: an opened device, a device index, or part of a device's name.
        base_dtype: a base format of `weights.registry`. A model that is stored in one keeps it by default.

    Raises:
        UserError: the model cannot be downloaded or read, or is not supported.
    """
    base_dtype = base_format(base_dtype).name
    path = resolve_model(model)
    files = read_model(path)
    config, checkpoint = files.config, files.checkpoint
    if base_dtype == DEFAULT_FORMAT and config.packed:
        base_dtype = config.packed
    if config.packed not in (None, base_dtype):
        raise UserError(
            f"{setting('base_dtype', base_dtype)} is not possible: the linear layers of {model} are stored in "
            f"{config.packed.upper()}: leave it out, or use {setting('base_dtype', config.packed)}."
        )
    opened = device if isinstance(device, Device) else Device(device)
    stored = checkpoint if config.packed else None
    decoder = Decoder.declare(config, base_dtype, table_dtype(checkpoint, config), opened.max_binding, stored)
    return LoadedModel(model, path, config, checkpoint, files.tokenizer, opened, decoder)
