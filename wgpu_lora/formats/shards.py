"""Writes a Hugging Face model directory: safetensors shards, tensor by tensor, and the files that go with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from wgpu_lora.atomic import replace_directory
from wgpu_lora.bounded import check_name, leads_out
from wgpu_lora.errors import UserError
from wgpu_lora.formats.checkpoint import INDEX, SINGLE

MAX_SHARD_BYTES = 5 * 10**9  # transformers' own default
ITEM_BYTES = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4}
# Beside the weights, what a model directory is used with.
COMPANIONS = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*", "chat_templates/*.jinja")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written: its dtype in safetensors' notation, and its shape."""

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
) -> None:
    """Writes the tensors, in this order, into as few shards as the limit allows, and an index where there are several.

    Args:
        pieces: a tensor's values in row order, as arrays of its dtype's size; only one is in memory at a time.

    Raises:
        ValueError: the pieces of a tensor are not of its size. OSError: the disk refused.
    """
    shards = _planned(tensors, max_shard_bytes)
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for file, shard in zip(names, shards, strict=True):
        _write_shard(directory / file, {name: tensors[name] for name in shard}, pieces)
    if len(shards) > 1:
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": sum(spec.nbytes for spec in tensors.values())}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _planned(tensors: Mapping[str, TensorSpec], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    used = 0
    for name, spec in tensors.items():
        if shards[-1] and used + spec.nbytes > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += spec.nbytes
    return shards


def _write_shard(path: Path, tensors: Mapping[str, TensorSpec], pieces: Callable[[str], Iterable[np.ndarray]]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    at = 0
    for name, spec in tensors.items():
        header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [at, at + spec.nbytes]}
        at += spec.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the data are aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, spec in tensors.items():
            written = sum(file.write(np.ascontiguousarray(piece).data) for piece in pieces(name))
            if written != spec.nbytes:
                raise ValueError(f"{name}: {written} bytes came, but its shape takes {spec.nbytes}")


@contextmanager
def new_model_directory(output: Path, source: Path) -> Iterator[Path]:
    """A directory to write a model into, with the companions of `source` but no weights; at the end it is `output`.

    Raises:
        UserError: `output` holds something already, or cannot be made. Whatever fails, it is then not there.
    """
    check_name(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} exists already: choose another --output, or remove it.")
    temporary = output.absolute().with_name(f".{output.absolute().name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"The output directory {output} cannot be made: {error.strerror}.") from None
    try:
        for pattern in COMPANIONS:
            for path in source.glob(pattern):
                if path.is_file() and not path.name.endswith(".index.json"):
                    if leads_out(path, source):
                        raise UserError(
                            f"{path} is a link to a file outside of {source}: remove it, or put a copy there."
                        )
                    target = temporary / path.relative_to(source)
                    target.parent.mkdir(exist_ok=True)
                    shutil.copyfile(path, target)
        yield temporary
        replace_directory(temporary, output)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
