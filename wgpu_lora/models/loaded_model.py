"""A model with its files resolved and its tensors declared on a device."""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path

import numpy as np

from wgpu_lora.errors import NotFiniteError, UserError
from wgpu_lora.events import SILENT, Events
from wgpu_lora.formats.gguf.gguf_checkpoint import GGUFCheckpoint
from wgpu_lora.formats.hub import resolve_model
from wgpu_lora.formats.safetensors_checkpoint import Checkpoint, note_of_skipped
from wgpu_lora.formats.tokenizer.tokenizer import Tokenizer
from wgpu_lora.formats.tokenizer.tokenizer_files import tokenizer_files
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import with_option_advice
from wgpu_lora.gpu.memory_leases import claim
from wgpu_lora.gpu.program import allocate, missing_bytes, release
from wgpu_lora.models.decoder import Decoder
from wgpu_lora.models.model_config import ModelConfig, module_of
from wgpu_lora.models.model_files import read_model
from wgpu_lora.models.published_shapes import cut
from wgpu_lora.names.spelling import setting
from wgpu_lora.names.text import join_words
from wgpu_lora.weights.base import Loading, Packed, WeightSource, scratch_bytes, write
from wgpu_lora.weights.base_formats import AUTO, DEFAULT_FORMAT, GGUF, GGUF_PATTERN, base_format
from wgpu_lora.weights.dense import DTYPES


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

    @cached_property
    def tokenizer_files(self) -> dict[str, bytes]:
        """The files of the tokenizer and the chat template that adapters of this model are saved with."""
        return tokenizer_files(self.path, self.tokenizer)

    @property
    def notes(self) -> list[str]:
        """Sentences for the user about parts of the model's files that are not used."""
        other_parts = self.checkpoint.skipped_tensors if isinstance(self.checkpoint, Checkpoint) else {}
        return [*([note_of_skipped(other_parts)] if other_parts else []), *self.rounding]

    @property
    def rounding(self) -> list[str]:
        """Sentences for the user about quantised weights of a GGUF file that are rounded again."""
        if not isinstance(self.checkpoint, GGUFCheckpoint):
            return []
        base_dtype, kept_kinds, notes = self.decoder.base_dtype, set(), []
        rounded: dict[str, dict[str, set[str]]] = {}  # base format -> type in the file -> names of modules
        for name, weight in self.decoder.matrices():
            kind = self.checkpoint.quantised(name)
            if kind and kind.lower() == weight.format:
                kept_kinds.add(kind)
            elif kind:
                module = module_of(name).rpartition(".")[2]
                rounded.setdefault(weight.format, {}).setdefault(kind, set()).add(module)
        for target, modules in rounded.items():
            # Of a type that others keep: in Qwen3.5's out_proj, the file's order of heads may divide blocks.
            of = [
                f"{kind}{f' of {join_words(sorted(modules[kind]))}' * (kind in kept_kinds)}" for kind in sorted(modules)
            ]
            if target not in DTYPES.values():
                advice = f"leave out {setting('base_dtype', base_dtype)}"
                advice = "use a file with other types, such as Q8_0" if base_dtype == GGUF else advice
                notes.append(
                    f"the weights in {', '.join(of)} are rounded again, to {target}, which costs accuracy: {advice}"
                )
            elif base_dtype == GGUF:
                notes.append(f"the embedding or LM head in {', '.join(of)} is rounded to {target}")
        return notes

    @with_option_advice()
    def load_weights(self, events: Events = SILENT) -> None:
        """Streams the weights onto the device, unless they are loaded already.

        Raises:
            UserError: a file is damaged, or the device's memory does not suffice.
        """
        if self.weights_loaded:
            return
        total, counter = self.tensors_to_load(), count(1)

        def report(tensor: str) -> None:
            events.loading(self.name, tensor, next(counter), total)

        with claim(self.device, self.bytes_to_load(), f"the weights of {self.name}"):
            self.weights_sha256 = load_weights(self.device, self.checkpoint, self.decoder, report, self.importance)
            self.weights_loaded = True

    def unload(self) -> None:
        """Frees the weights."""
        release(self.device, self.decoder.storages())
        self.weights_loaded = False

    def declared(self, layers: int | None = None) -> LoadedModel:
        """The same model, or its first `layers` layers, with nothing on the device. UserError where it has fewer."""
        config = cut(self.config, layers)
        decoder = declare_decoder(config, self.checkpoint, self.decoder.base_dtype, self.device)
        return replace(self, config=config, decoder=decoder, weights_loaded=False)

    def tensors_to_load(self) -> int:
        """How many tensors `load_weights` loads."""
        return 0 if self.weights_loaded else tensor_count(self.decoder)

    def bytes_to_load(self) -> int:
        """Device memory in bytes that `load_weights` needs at most."""
        if self.weights_loaded:
            return 0
        return missing_bytes(self.decoder.storages()) + staging_bytes(self.decoder)


def open_model(model: str, device: Device | str | int | None = None, base_dtype: str = AUTO) -> LoadedModel:
    """Reads a model's files and declares its tensors, without allocating them.

    Args:
        model: a directory, a GGUF file, a hub id, or `demo`.
        device: an opened device, a device index, or part of a device's name.
        base_dtype: a base format of `weights.base_formats`, or AUTO.

    Raises:
        UserError: the model cannot be downloaded or read, or is not supported.
    """
    path = resolve_model(model)
    files = read_model(path)
    config, checkpoint = files.config, files.checkpoint
    in_file = GGUF if isinstance(checkpoint, GGUFCheckpoint) else config.packed
    base_dtype = in_file or DEFAULT_FORMAT if base_dtype == AUTO else base_format(base_dtype).name
    if re.fullmatch(f"{GGUF}|{GGUF_PATTERN}", base_dtype) and base_dtype != in_file:
        raise UserError(
            f"{setting('base_dtype', base_dtype)} is not possible: GGUF files keep their types by default, and nothing "
            f"else has them: leave it out, or use {setting('base_dtype', DEFAULT_FORMAT)}."
        )
    if config.packed not in (None, base_dtype):
        raise UserError(
            f"{setting('base_dtype', base_dtype)} is not possible: the linear layers of {model} are stored in "
            f"{config.packed.upper()}: leave it out, or use {setting('base_dtype', config.packed)}."
        )
    opened = device if isinstance(device, Device) else Device(device)
    decoder = declare_decoder(config, checkpoint, base_dtype, opened)
    return LoadedModel(model, path, config, checkpoint, files.tokenizer, opened, decoder)


def declare_decoder(config: ModelConfig, checkpoint: WeightSource, base_dtype: str, device: Device) -> Decoder:
    """Declares the tensors of a checkpoint's model in a base format."""
    formats = checkpoint if base_dtype in (config.packed, GGUF) else None
    table = table_dtype(checkpoint, config, base_dtype)
    return Decoder.declare(config, base_dtype, table, device.max_binding, formats)


def table_dtype(checkpoint: WeightSource, config: ModelConfig, base_dtype: str) -> str:
    """The dtype of the embedding on the device, if it is dense: that in which it is stored, and f32 for a GGUF file in
    an f32 base, since F16 rounds quantised values."""
    if base_dtype == "f32" and isinstance(checkpoint, GGUFCheckpoint):
        return "f32"
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


def _fill(loading: Loading, checkpoint: AuditedSource, model: Decoder, progress: Callable[[str], None]) -> None:
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


LARGEST = {"BF16": 0x7F7F, "F16": 0x7BFF, "F32": 0x7F7FFFFF}  # bits of the largest finite magnitude
FLOATS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # NumPy's names -> safetensors' notation
AHEAD = 1  # pieces that may wait to be checked
CHUNK = 1 << 18  # values checked at a time, so that they stay in the processor's cache


class AuditedSource:
    """A checkpoint whose reads are hashed and checked in a separate thread, in parallel to the device's work.

    Packing would hide a NaN, and a change in the middle of a shard does not show in its header, so every value is
    checked. Each tensor must be read once, from the first row to the last.

    A context manager; leaving it waits for the thread.
    """

    def __init__(self, source: WeightSource):
        self._source = source
        self._hashes: dict[str, hashlib._Hash] = {}
        self._pool = ThreadPoolExecutor(1, "weights")
        self._queue: deque[Future[None]] = deque()

    def __enter__(self) -> AuditedSource:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def digest(self) -> str:
        """SHA-256 (hex) over the names and values of all tensors read.

        Raises:
            NotFiniteError: a value is NaN or infinite.
        """
        self._settle(0)
        lines = (f"{name} {sha.hexdigest()}\n" for name, sha in sorted(self._hashes.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    # -- WeightSource ------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        return self._source.names()

    def dtype(self, name: str) -> str:
        return self._source.dtype(name)

    def read_raw(self, name: str, row_start: int = 0, row_stop: int | None = None) -> np.ndarray:
        return self._look(name, self._source.read_raw(name, row_start, row_stop), self._source.dtype(name))

    def read_f32(self, name: str, row_start: int = 0, row_stop: int | None = None) -> np.ndarray:
        return self._look(name, self._source.read_f32(name, row_start, row_stop), "F32")

    def packed(self, name: str) -> Packed | None:
        result = self._source.packed(name)
        return result and replace(result, read=lambda: self._look_at_parts(name, result))

    def base_format(self, name: str) -> str | None:
        return self._source.base_format(name)

    def read_blocks(self, name: str, base_format: str, row_start: int, row_stop: int) -> np.ndarray:
        return self._look(name, self._source.read_blocks(name, base_format, row_start, row_stop), None)

    def _look_at_parts(self, name: str, packed: Packed) -> tuple[np.ndarray, ...]:
        return tuple(self._look(name, part, FLOATS.get(part.dtype.name)) for part in packed.read())

    # -- the thread --------------------------------------------------------------------------------------------------

    def _look(self, name: str, values: np.ndarray, dtype: str | None) -> np.ndarray:
        """Returns `values` and queues their check, waiting until at most AHEAD others are pending."""
        self._settle(AHEAD)
        sha = self._hashes.setdefault(name, hashlib.sha256())
        self._queue.append(self._pool.submit(_examine, name, sha, np.ascontiguousarray(values), dtype))
        return values

    def _settle(self, limit: int) -> None:
        while len(self._queue) > limit:
            self._queue.popleft().result()


def _examine(name: str, sha: hashlib._Hash, values: np.ndarray, dtype: str | None) -> None:
    sha.update(values.reshape(-1).view(np.uint8).data)
    if dtype is None or not values.size:
        return
    bits = values.reshape(-1).view(np.uint32 if dtype == "F32" else np.uint16)
    magnitude = 0x7FFFFFFF if dtype == "F32" else 0x7FFF
    for first in range(0, bits.size, CHUNK):
        # Without the sign, a float's bits are ordered like its magnitude, with infinity and NaN last.
        if np.bitwise_and(bits[first : first + CHUNK], magnitude).max() > LARGEST[dtype]:
            raise NotFiniteError(f"{name} holds values that are NaN or infinite: download or convert the model again.")
