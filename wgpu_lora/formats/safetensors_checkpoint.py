"""Reads a model's safetensors shards, a few rows at a time.

Opening a checkpoint only reads headers. Rows are read from the file on request, so that no more than the requested rows
are in memory.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.files.json_files import read_json
from wgpu_lora.files.locks import is_directory
from wgpu_lora.formats.file_digests import check_digests
from wgpu_lora.formats.safetensors_header import TensorEntry, read_bytes, read_header
from wgpu_lora.names.text import join_words
from wgpu_lora.weights.base import Packed
from wgpu_lora.weights.base_formats import packed_form

if TYPE_CHECKING:
    from wgpu_lora.weights.base import Packed


@dataclass(frozen=True)
class TensorNames:
    """The names of a model that may be part of a larger one, such as one that also sees images.

    renamed: (beginning in files, beginning in the model), where these differ. Files may have either.
    skipped_prefixes: beginnings of the names of the other parts' tensors.
    """

    renamed: tuple[tuple[str, str], ...] = ()
    skipped_prefixes: tuple[str, ...] = ()

    def is_skipped(self, name: str) -> bool:
        """Whether a tensor, by its name in a file, is of another part."""
        return name.startswith(self.skipped_prefixes)

    def model_name(self, name: str) -> str:
        """The model's name of a tensor in a file."""
        for stored_prefix, prefix in self.renamed:
            if name.startswith(stored_prefix):
                return prefix + name[len(stored_prefix) :]
        return name


def parts_of(names: Iterable[str]) -> tuple[str, ...]:
    """The modules that tensors belong to: 'model.visual.patch_embed.weight' -> 'visual'."""
    return tuple(dict.fromkeys(name.removeprefix("model.").partition(".")[0] for name in sorted(names)))


def note_of_skipped(names: Iterable[str]) -> str:
    """A sentence for the user about the tensors of other parts."""
    tensors = tuple(names)
    parts = join_words(parts_of(tensors))
    return f"only the text part of this model is used: {len(tensors):,} tensors of {parts} are skipped"


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SUPPORTED_DTYPES: dict[str, np.dtype] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<u2"), "F32": np.dtype("<u4")}

EDGE_BYTES = 64 * 1024
PLAIN = TensorNames()
_FILE_NAME = re.compile(r"[^/\\:\0]{1,200}")
_LAYER = re.compile(r".*?\.[0-9]{1,6}\.")  # a tensor's name up to the layer's number


class Checkpoint:
    """The safetensors shards of a model directory.

    skipped_tensors: the tensors of other parts of a larger model, by their names in the files
        (`naming.skipped_prefixes`).

    Raises:
        UserError: the directory, its index or a shard is missing or damaged.
    """

    def __init__(self, directory: str | Path, naming: TensorNames = PLAIN):
        self.directory = Path(directory)
        if not is_directory(self.directory):
            raise UserError(f"{self.directory} is not a directory: give a directory that holds {SINGLE}.")
        # The order of precedence is that of transformers.
        if (self.directory / SINGLE).exists():
            self.shards = [self.directory / SINGLE]
            entries = read_header(self.shards[0])
        else:
            self.shards, entries = _read_index(self.directory)
        self.skipped_tensors = {name: entry for name, entry in entries.items() if naming.is_skipped(name)}
        self._entries: dict[str, TensorEntry] = {}
        self._renamed: dict[str, str] = {}  # beginning in the model -> in the files
        for name in (name for name in entries if name not in self.skipped_tensors):
            model_name = naming.model_name(name)
            if model_name in self._entries:
                raise UserError(
                    f"{self.directory} holds {model_name} under two names: download or copy the model again."
                )
            self._entries[model_name] = entries[name]
        for stored_prefix, prefix in naming.renamed:
            if any(name.startswith(stored_prefix) for name in entries):
                self._renamed[prefix] = stored_prefix

    def names(self) -> list[str]:
        """The tensors' names, sorted."""
        return sorted(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def stored_name(self, name: str) -> str:
        """How the files name a tensor of the model, or would name another one of the same module."""
        for prefix, stored_prefix in self._renamed.items():
            if name.startswith(prefix):
                return stored_prefix + name[len(prefix) :]
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor. Raises UserError if it does not exist."""
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        """The dtype of a tensor in safetensors' notation: 'BF16', 'F16', 'F32', or one that cannot be read."""
        return self._entry(name).dtype

    def read_raw(self, name: str, row_start: int = 0, row_stop: int | None = None) -> np.ndarray:
        """The stored bits of rows [row_start, row_stop): uint16 (BF16, F16) or uint32 (F32), [rows, *shape[1:]].

        For a 1-D tensor, a row is an element.

        Raises:
            UserError: the tensor is missing, has another dtype, or the file has been truncated since it was opened.
            ValueError: the rows are out of range.
        """
        return _read_rows(name, self._entry(name), row_start, row_stop)

    def read_stored(self, name: str) -> np.ndarray:
        """The bytes of a whole tensor of any dtype: uint8."""
        return read_bytes(self._entry(name))

    def base_format(self, name: str) -> str | None:
        """The base format that keeps a tensor as it is stored."""
        return self.dtype(name).lower()

    def packed(self, name: str) -> Packed | None:
        """The tensor if it is stored in a base format, as in `PackedCheckpoint`; here always None."""
        return None

    def read_blocks(self, name: str, base_format: str, row_start: int, row_stop: int) -> np.ndarray:
        raise ValueError(f"{name} is not in a GGUF file")

    def read_f32(self, name: str, row_start: int = 0, row_stop: int | None = None) -> np.ndarray:
        """The rows of `read_raw`, converted to float32, which is exact."""
        return _widen(self.read_raw(name, row_start, row_stop), self.dtype(name))

    def check_against(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises UserError unless every parameter exists with the right shape and a readable dtype.

        Unknown tensors in the model's layers are refused, because ignoring a bias, say, would change results. Buffers
        (`inv_freq`) and a tied copy of the LM head are ignored.
        """
        for name, shape in shapes.items():
            self.check_parameter(name, shape)
        self.check_unknown(shapes)

    def check_parameter(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises UserError unless the tensor exists with this shape and a readable dtype."""
        entry = self._entry(name)
        if entry.shape != shape:
            raise UserError(
                f"{name} in {entry.path} has shape {list(entry.shape)} but config.json asks for {list(shape)}: "
                "use the config.json and shards of one model."
            )
        _readable(name, entry)

    def check_unknown(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raises UserError if a layer has a tensor that is not one of its parameters."""
        layers = {match[0] for name in expected if (match := _LAYER.match(name))}
        for name in self.names():
            layer = _LAYER.match(name)
            if layer and layer[0] in layers and name not in expected and not name.endswith("rotary_emb.inv_freq"):
                raise UserError(
                    f"{self._entries[name].path} holds {name}, which config.json does not account for: "
                    "use the config.json and shards of one model."
                )

    def check_digests(self) -> None:
        """Raises UserError if a shard, or a file beside it, is not as it was written, as far as its digest is known."""
        for path in self.shards:
            check_digests(path)

    def digest(self) -> str:
        """A SHA-256 (hex) that identifies the checkpoint without reading it completely.

        It covers the sorted (name, dtype, shape) of all tensors, and the size and the first and last 64 KiB of each
        shard. A change in the middle of a shard is not noticed.
        """
        sha = hashlib.sha256()
        tensors = [(name, self.dtype(name), list(self.shape(name))) for name in self.names()]
        sha.update(json.dumps(tensors).encode())
        for path in sorted(self.shards):
            size = path.stat().st_size
            sha.update(size.to_bytes(8, "little"))
            with path.open("rb") as file:
                sha.update(file.read(EDGE_BYTES))
                file.seek(max(0, size - EDGE_BYTES))
                sha.update(file.read(EDGE_BYTES))
        return sha.hexdigest()

    def _entry(self, name: str) -> TensorEntry:
        if name not in self._entries:
            raise UserError(
                f"{name} is missing from the shards in {self.directory}: restore them or use another model."
            )
        return self._entries[name]


def _read_index(directory: Path) -> tuple[list[Path], dict[str, TensorEntry]]:
    index = directory / INDEX
    if not index.exists():
        raise UserError(f"{directory} holds neither {SINGLE} nor {INDEX}: give a model in safetensors format.")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} has no weight_map: restore the file from the model's source.")
    headers: dict[str, dict[str, TensorEntry]] = {}
    entries = {}
    for name, shard in weight_map.items():
        # Shards must be in the directory of their index: other paths could point to any file.
        if not isinstance(shard, str) or shard in (".", "..") or not _FILE_NAME.fullmatch(shard):
            raise UserError(f"{index} names the shard {shard!r}, which is not a plain file name: correct the index.")
        if shard not in headers:
            if not (directory / shard).is_file():
                raise UserError(f"{index} names the shard {shard}, which is missing from {directory}: download it.")
            headers[shard] = read_header(directory / shard)
        if name not in headers[shard]:
            raise UserError(f"{index} places {name} in {shard}, which does not hold it: restore index and shards.")
        entries[name] = headers[shard][name]
    return [directory / shard for shard in sorted(headers)], entries


def _readable(name: str, entry: TensorEntry) -> np.dtype:
    if entry.dtype not in SUPPORTED_DTYPES:
        supported = ", ".join(SUPPORTED_DTYPES)
        raise UserError(f"{name} in {entry.path} has dtype {entry.dtype}: use a checkpoint stored as {supported}.")
    return SUPPORTED_DTYPES[entry.dtype]


def read_f32_entry(name: str, entry: TensorEntry) -> np.ndarray:
    """A whole tensor as float32. Raises UserError as `Checkpoint.read_raw` does."""
    return _widen(_read_rows(name, entry, 0, None), entry.dtype)


def _read_rows(name: str, entry: TensorEntry, row_start: int, row_stop: int | None) -> np.ndarray:
    item = _readable(name, entry)
    rows = entry.shape[0] if entry.shape else 1
    row_stop = rows if row_stop is None else row_stop
    if not 0 <= row_start <= row_stop <= rows:
        raise ValueError(f"rows {row_start}:{row_stop} of {name}, which has {rows}")
    row_items = int(np.prod(entry.shape[1:], dtype=np.int64))
    count = (row_stop - row_start) * row_items
    offset = entry.offset + row_start * row_items * item.itemsize
    if entry.data is None:
        values = np.fromfile(entry.path, item, count, offset=offset)
    else:
        values = np.frombuffer(entry.data, item, count, offset)
    if values.size != count:
        raise UserError(f"{entry.path} ended while {name} was read: download or copy the shard again.")
    return values.reshape(row_stop - row_start, *entry.shape[1:])


def _widen(raw: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.view(np.float32) if dtype == "F32" else raw.view(np.float16).astype(np.float32)


# -- models whose linear layers are stored in a base format ------------------------------------------------------------

# safetensors' notation -> NumPy, of the tensors of packed matrices
ARRAYS = {
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U32": np.dtype(np.uint32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
}


class PackedCheckpoint(Checkpoint):
    """A checkpoint with packed linear layers. `names` lists whole parameters, not their parts.

    base_format: the registered format that they are stored in.
    """

    def __init__(self, directory: str | Path, base_format: str, naming: TensorNames = PLAIN):
        super().__init__(directory, naming)
        self._format, self._form = base_format, packed_form(base_format)
        self._shapes: Mapping[str, tuple[int, ...]] = {}

    def names(self) -> list[str]:
        return [name for name in super().names() if not name.endswith(self._form.suffixes)]

    def dtype(self, name: str) -> str:
        return self._format.upper() if self._is_packed(name) else super().dtype(name)

    def packed(self, name: str) -> Packed | None:
        return self._form.read(self, name, self._shapes[name]) if self._is_packed(name) else None

    def base_format(self, name: str) -> str | None:
        packed = self.packed(name)
        return packed.format if packed else super().base_format(name)

    def stored_dtype(self, name: str) -> str:
        """The dtype of a tensor, in safetensors' notation, as it is stored."""
        return super().dtype(name)

    def array(self, name: str, dtype: str) -> np.ndarray:
        """A tensor's values, flattened. Raises UserError unless it has this dtype, one of ARRAYS."""
        if super().dtype(name) != dtype:
            raise UserError(f"{name} in {self.directory} is not of type {dtype}: copy the model again.")
        return self.read_stored(name).reshape(-1).view(ARRAYS[dtype])

    def check_against(self, shapes: Mapping[str, tuple[int, ...]], matrices: Collection[str] | None = None) -> None:
        """Raises UserError unless all parameters exist, and the packed ones are in a supported form.

        matrices: names of those that may be packed; by default, any.
        """
        self._shapes = shapes
        for name, shape in shapes.items():
            if not self._is_packed(name):
                self.check_parameter(name, shape)
                continue
            if matrices is not None and name not in matrices:
                raise UserError(f"{name} in {self.directory} is packed, but is not a linear layer: use another model.")
            self._form.check(self, name, shape, self._format)
        self.check_unknown(shapes)

    def _is_packed(self, name: str) -> bool:
        return self._form.is_packed(self, name)
