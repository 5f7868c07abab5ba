"""Writes a Hugging Face model directory: safetensors shards, tensor by tensor, and the other files."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.files.paths import links_outside
from wgpu_lora.formats.file_digests import NO_DIGEST, companion_digests, digest_metadata, files_in
from wgpu_lora.formats.safetensors_checkpoint import INDEX, SINGLE
from wgpu_lora.formats.safetensors_header import ITEM_BYTES

MAX_SHARD_BYTES = 5 * 10**9  # transformers' own default
# The files of a model directory besides the weights.
COMPANIONS = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*", "chat_templates/*.jinja")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to write: its dtype in safetensors' notation, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * prod(self.shape)


def write_shards(
    directory: Path,
    tensors: Mapping[str, TensorSpec],
    pieces: Callable[[str], Iterable[np.ndarray]],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    companions: bool = False,
) -> None:
    """Writes the tensors, in this order, into as few shards as the limit allows, with an index if there are several.

    Args:
        pieces: yields a tensor's values in row order, as arrays with its dtype's item size.
        companions: whether the shards have the digests of the files that are beside them.

    Raises:
        ValueError: the pieces do not add up to the tensor's size.
        OSError: a file cannot be written.
    """
    shards = _shard_names(tensors, max_shard_bytes)
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    if len(shards) > 1:
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": sum(spec.nbytes for spec in tensors.values())}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    metadata = digest_metadata(companion_digests(files_in(directory) if companions else {}))
    for file, shard in zip(names, shards, strict=True):
        _write_shard(directory / file, {name: tensors[name] for name in shard}, pieces, metadata)


def _shard_names(tensors: Mapping[str, TensorSpec], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in tensors.items():
        if shards[-1] and size + spec.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += spec.nbytes
    return shards


def _write_shard(
    path: Path,
    tensors: Mapping[str, TensorSpec],
    pieces: Callable[[str], Iterable[np.ndarray]],
    metadata: Mapping[str, str],
) -> None:
    header: dict[str, object] = {"__metadata__": metadata}  # the digest follows when the values are known
    at = 0
    for name, spec in tensors.items():
        header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [at, at + spec.nbytes]}
        at += spec.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the data
    text = len(text).to_bytes(8, "little") + text
    sha = hashlib.sha256(text)
    with path.open("wb") as file:
        file.write(text)
        for name, spec in tensors.items():
            size = 0
            for piece in pieces(name):
                data = np.ascontiguousarray(piece).data
                sha.update(data)
                size += file.write(data)
            if size != spec.nbytes:
                raise ValueError(f"{name}: got {size} bytes, expected {spec.nbytes}")
        file.seek(text.index(NO_DIGEST.encode()))
        file.write(sha.hexdigest().encode())


def copy_companions(source: Path, directory: Path) -> None:
    """Copies the files of a model directory except weights.

    Raises:
        UserError: one is a link that leads out of `source`.
    """
    for pattern in COMPANIONS:
        for path in source.glob(pattern):
            if path.is_file() and not path.name.endswith(".index.json"):
                if links_outside(path, source):
                    raise UserError(
                        f"{path} is a link to a file outside of {source}: remove it, or replace it with a copy."
                    )
                target = directory / path.relative_to(source)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
