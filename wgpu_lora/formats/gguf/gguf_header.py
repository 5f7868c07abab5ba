"""Reads the header of a GGUF file: its metadata and the places of its tensors. The file is untrusted.

Every length and count is checked against the remaining bytes before anything is read. Arrays are skipped, and read on
request, so that a hostile file cannot use much memory.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from wgpu_lora.errors import UserError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Limits far beyond real models: 50 keys and 1,200 tensors are many.
MAX_KEYS = 1 << 12
MAX_TENSORS = 1 << 14
MAX_ARRAY_TEXT = 16 << 20  # bytes of an array of strings
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in the file: its GGML type, shape (rows first), absolute offset and size in bytes."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """The header of a file. values: numbers, booleans, strings and `Array`s, by key."""

    path: Path
    values: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def number(self, key: str, default: Any = None) -> Any:
        """A number, or the default if it is missing. Raises UserError if it is not a number."""
        value = self.values.get(key, default)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        if isinstance(value, float) and math.isfinite(value):
            return float(str(np.float32(value))) if abs(value) < 1e38 else value  # 1e-6, not its nearest f32
        text = "an array" if isinstance(value, Array) else f"{value!r:.100}"
        raise UserError(f"{key} in {self.path} is {text}, expected one number: use another model.")

    def strings(self, key: str, limit: int) -> Iterator[str] | None:
        """The strings of an array, read lazily, or None if the key is missing.

        Raises:
            UserError: it is not an array of strings, has more than `limit`, or exceeds MAX_ARRAY_TEXT bytes.
        """
        array = self._array(key)
        if array is None:
            return None
        if array.kind != STRING or array.count > limit or array.nbytes - 8 * array.count > MAX_ARRAY_TEXT:
            raise UserError(
                f"{key} in {self.path} is not an array of at most {limit:,} strings of {MAX_ARRAY_TEXT >> 20} MiB: "
                "use another conversion of the model."
            )
        return self._iter_strings(key, array)

    def _iter_strings(self, key: str, array: Array) -> Iterator[str]:
        with opened(self.path) as file:
            reader = Reader(self.path, file, array.offset)
            for data in reader.strings(array.count, True):
                try:
                    yield data.decode()
                except UnicodeDecodeError:
                    raise reader.damaged(f"holds a string in {key} that is not UTF-8") from None

    def numbers(self, key: str, count: int) -> np.ndarray | None:
        """An array of `count` numbers, or None if the key is missing. Raises UserError if it is something else."""
        array = self._array(key)
        if array is None:
            return None
        if array.kind == STRING or array.count != count:
            raise UserError(
                f"{key} in {self.path} is not an array of {count:,} numbers: use another conversion of the model."
            )
        values = np.fromfile(self.path, NUMBERS[array.kind], array.count, offset=array.offset)
        if values.size != array.count:
            raise UserError(f"{self.path} ended while {key} was read: download or copy the file again.")
        return values

    def _array(self, key: str) -> Array | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, Array):
            raise UserError(f"{key} in {self.path} is not an array: use another conversion of the model.")
        return value


def special_ids(header: Header, vocab_size: int) -> list[int]:
    """The token ids in the metadata that end a text, a turn or a message."""
    ids = (header.values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(id for id in ids if type(id) is int and 0 <= id < vocab_size))


def read_header(path: str | Path) -> Header:
    """Reads and checks the header of a GGUF file, version 2 or 3, little-endian.

    Raises:
        UserError: the file cannot be read, is truncated or damaged, or is not a GGUF file.
    """
    path = Path(path)
    with opened(path) as file:
        reader = Reader(path, file)
        tensor_count, key_count = _read_start(reader)
        values: dict[str, Any] = {}
        for _ in range(key_count):
            key = reader.text("a key")
            if key in values:
                raise reader.damaged(f"holds the key {key!r:.100} twice")
            values[key] = reader.value(reader.number("<I"), key)
        infos = [_read_info(reader) for _ in range(tensor_count)]
        tensors = _placed(reader, infos, values.get("general.alignment", 32))
    return Header(path, values, tensors)


def _read_start(reader: Reader) -> tuple[int, int]:
    """Reads the start of the file; returns the number of (tensors, keys)."""
    path = reader.path
    if reader.size < 24:
        raise reader.damaged("is too short for a GGUF file")
    if reader.take(4, "the magic") != MAGIC:
        raise UserError(f"{path} is not a GGUF file: give a model's GGUF file, or a directory of safetensors.")
    version = reader.number("<I")
    if version not in VERSIONS:
        if version and version & 0xFFFF == 0:
            raise UserError(f"{path} is a big-endian GGUF file, which is not supported: use a little-endian one.")
        raise UserError(
            f"{path} is of GGUF version {version}, but only 2 and 3 are supported: convert the model again."
        )
    tensors, keys = reader.number("<Q"), reader.number("<Q")
    # A tensor takes at least 24 bytes, a key 13.
    if keys > MAX_KEYS or tensors > MAX_TENSORS or 24 * tensors + 13 * keys > reader.size:
        raise reader.damaged(f"claims {tensors:,} tensors and {keys:,} keys, more than fit into it")
    return tensors, keys


def _read_info(reader: Reader) -> tuple[str, TensorInfo]:
    """Reads a tensor's name and info, whose offset is relative to the start of the tensors."""
    name = reader.text("a tensor's name")
    dimensions = reader.number("<I")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise reader.damaged(f"gives {name!r:.100} {dimensions} dimensions")
    shape = struct.unpack(f"<{dimensions}Q", reader.take(8 * dimensions, "a shape"))
    number, offset = reader.number("<I"), reader.number("<Q")
    try:
        kind = GGMLQuantizationType(number)
        block, nbytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise UserError(
            f"{name!r:.100} in {reader.path} has the unknown GGML type {number}: use another quantisation."
        ) from None
    if 0 in shape or shape[0] % block:
        raise reader.damaged(f"gives {name!r:.100} the shape {list(shape)}, which {kind.name} cannot have")
    return name, TensorInfo(kind, shape[::-1], offset, prod(shape) // block * nbytes)


def _placed(reader: Reader, infos: list[tuple[str, TensorInfo]], alignment: object) -> dict[str, TensorInfo]:
    """The tensors by name, with absolute offsets. Raises UserError if they overlap or exceed the file."""
    if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise reader.damaged(f"has general.alignment {alignment!r:.100}, which is not a power of two")
    start = -(-reader.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, info in infos:
        if name in tensors:
            raise reader.damaged(f"holds the tensor {name!r:.100} twice")
        if info.offset % alignment:
            raise reader.damaged(f"places {name!r:.100} at {info.offset}, which is not a multiple of {alignment}")
        if start + info.offset + info.nbytes > reader.size:
            missing = start + info.offset + info.nbytes - reader.size
            raise reader.damaged(f"is truncated, {missing:,} bytes of {name!r:.100} are missing")
        tensors[name] = TensorInfo(info.kind, info.shape, start + info.offset, info.nbytes)
    last_end, last = 0, ""
    for name, info in sorted(tensors.items(), key=lambda item: item[1].offset):
        if info.offset < last_end:
            raise reader.damaged(f"lets {last!r:.100} and {name!r:.100} overlap")
        last_end, last = info.offset + info.nbytes, name
    return tensors


# Limits far beyond real models: 25 MB and 700,000 strings make a large header.
MAX_HEADER_BYTES = 256 << 20
MAX_STRINGS = 1 << 20
MAX_TEXT_BYTES = 8 << 20  # total of all keys, names and single strings
STRING = 8
NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8"}
NUMBERS |= {12: "<f8"}
_ARRAY, _BOOL = 9, 7
_WINDOW = 1 << 18  # bytes of the file in memory at a time


@dataclass(frozen=True)
class Array:
    """An array of the metadata that has been skipped: the type of its items, their number and their offset."""

    kind: int
    count: int
    offset: int
    nbytes: int


def opened(path: Path) -> BinaryIO:
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is not a file: give the path of a GGUF file.")
        return path.open("rb", buffering=0)
    except FileNotFoundError:
        raise UserError(f"the model file {path} does not exist: check the path.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read ({reason}): restore the file or its permissions.") from None


class Reader:
    """Reads a file in order, with a window of it in memory."""

    def __init__(self, path: Path, file: BinaryIO, offset: int = 0):
        self.path, self.file = path, file
        self.size = file.seek(0, 2)
        self.limit = min(self.size, MAX_HEADER_BYTES)
        self.window, self.first, self.at = b"", 0, offset  # `at` is absolute
        self.remaining_strings, self.remaining_text = MAX_STRINGS, MAX_TEXT_BYTES

    def damaged(self, problem: str) -> UserError:
        return UserError(f"{self.path} {problem}: download or copy the file again.")

    def need(self, count: int, label: str) -> None:
        """Raises UserError unless `count` bytes are left."""
        if count <= self.limit - self.at:
            return
        if self.limit < self.size:
            raise UserError(f"The header of {self.path} is longer than {MAX_HEADER_BYTES >> 20} MiB: use another file.")
        raise self.damaged(f"is truncated or damaged, {label} of {count:,} bytes does not fit into it")

    def take(self, count: int, label: str) -> bytes:
        self.need(count, label)
        start = self.at - self.first
        if start < 0 or start + count > len(self.window):
            self.file.seek(self.at)
            self.first, start = self.at, 0
            self.window = self._read(max(count, _WINDOW))
            if len(self.window) < count:
                raise self.damaged("ended while it was read")
        self.at += count
        return self.window[start : start + count]

    def _read(self, count: int) -> bytes:
        parts = []
        while count and (part := self.file.read(count)):
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form), "a number"))[0]

    def text(self, label: str) -> str:
        length = self.number("<Q")
        self.need(length, label)
        self.remaining_text -= length
        if self.remaining_text < 0:
            raise self.damaged(f"has more than {MAX_TEXT_BYTES >> 20} MiB of names and texts")
        try:
            return self.take(length, label).decode()
        except UnicodeDecodeError:
            raise self.damaged(f"holds {label:.100} that is not UTF-8") from None

    def value(self, kind: int, key: str) -> Any:
        """Reads a value of the metadata. An array is skipped."""
        if kind == STRING:
            return self.text(f"the value of {key!r:.100}")
        if kind != _ARRAY:
            return self._scalar(kind, key)
        item, count = self.number("<I"), self.number("<Q")
        if item == _ARRAY:
            raise self.damaged(f"nests arrays in {key!r:.100}, which is not supported")
        offset = self.at
        if item == STRING:
            self.need(8 * count, f"the array {key!r:.100}")
            self.remaining_strings -= count
            if self.remaining_strings < 0:
                raise self.damaged(f"has more than {MAX_STRINGS:,} strings")
            for _ in self.strings(count, False):
                pass
        elif item in NUMBERS:
            nbytes = np.dtype(NUMBERS[item]).itemsize * count
            self.need(nbytes, f"the array {key!r:.100}")
            self.at += nbytes
        else:
            raise self.damaged(f"has items of the unknown type {item} in {key!r:.100}")
        return Array(item, count, offset, self.at - offset)

    def _scalar(self, kind: int, key: str) -> bool | int | float:
        if kind not in NUMBERS:
            raise self.damaged(f"gives {key!r:.100} the unknown type {kind}")
        dtype = np.dtype(NUMBERS[kind])
        value = np.frombuffer(self.take(dtype.itemsize, "a value"), dtype)[0].item()
        if kind != _BOOL:
            return value
        if value > 1:
            raise self.damaged(f"gives {key!r:.100} the value {value}, expected true or false")
        return bool(value)

    def strings(self, count: int, keep: bool) -> Iterator[bytes]:
        """Yields the next strings, or empty ones unless `keep`, read a window at a time."""
        length_at = struct.Struct("<Q").unpack_from
        while count:
            start = self.at
            window = self.take(min(_WINDOW, self.limit - start), "an array of strings")
            at, end = 0, len(window)
            while count and at + 8 <= end:
                stop = at + 8 + length_at(window, at)[0]
                if stop > end:
                    break
                yield window[at + 8 : stop] if keep else b""
                at, count = stop, count - 1
            self.at = start + at
            if count and (not at or self.limit - self.at < 8):  # a string longer than the window, or the file's end
                length = self.number("<Q")
                self.need(length, "a string")
                yield self.take(length, "a string") if keep else b""
                self.at += 0 if keep else length
                count -= 1
