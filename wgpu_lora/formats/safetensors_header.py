"""The header of a safetensors file, checked against the file's size, and the bytes of its tensors."""

from __future__ import annotations

import io
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TypeGuard

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.files.json_files import MAX_JSON_BYTES, parse_object

MAX_DIMENSIONS = 8
MAX_EXTENT = 1 << 48
ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2}
ITEM_BYTES |= {"I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file, with the absolute byte offset of its first element.

    data: the file's content, if it is in memory; `path` is then for messages only.
    """

    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]
    data: bytes | None = field(default=None, repr=False)


def read_header(path: Path, content: bytes | None = None) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file, checked against the file's size. Raises UserError if it is damaged.

    content: that of the file, if it is in memory.
    """
    if content is None and path.exists() and not path.is_file():  # opening a pipe would block
        raise UserError(f"{path} is not a regular file: restore it.")
    try:
        size = path.stat().st_size if content is None else len(content)
        with path.open("rb") if content is None else io.BytesIO(content) as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise UserError(
                    f"{path} is not a complete safetensors file ({size} bytes, header of {length}): copy it again."
                )
            data = file.read(min(length, MAX_JSON_BYTES + 1))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): restore the file or its permissions.") from None
    header = parse_object(data, f"the header of {path}")
    header.pop("__metadata__", None)
    entries, spans = {}, []
    for name, value in header.items():
        entry, begin, end = _parse_entry(path, name, value, 8 + length)
        entry = entry if content is None else replace(entry, data=content)
        entries[name] = entry
        spans.append((begin, end, name))
    _check_spans(path, spans, size - 8 - length)
    return entries


def _parse_entry(path: Path, name: str, value: object, data_start: int) -> tuple[TensorEntry, int, int]:
    damaged = UserError(f"The header of {path} is invalid for {name}: download or copy the file again.")
    if not isinstance(value, dict):
        raise damaged
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise damaged
    begin, end = offsets
    if len(shape) > MAX_DIMENSIONS:
        raise damaged
    items = prod(shape)
    if begin > end or (dtype in ITEM_BYTES and end - begin != items * ITEM_BYTES[dtype]):
        raise damaged
    return TensorEntry(path, data_start + begin, dtype, tuple(shape)), begin, end


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < MAX_EXTENT for item in value)


def _check_spans(path: Path, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    last_end, last_name = 0, ""
    for begin, end, name in sorted(spans):
        if end > data_bytes:
            missing = max(end for _, end, _ in spans) - data_bytes
            raise UserError(
                f"{path} is truncated, {missing} bytes are missing from its end: download or copy it again."
            )
        if begin < last_end and end > begin:
            raise UserError(f"{last_name} and {name} overlap in {path}: download or copy the file again.")
        last_end, last_name = max(end, last_end), name


def read_bytes(entry: TensorEntry) -> np.ndarray:
    """The bytes of a whole tensor of any dtype: uint8. Raises UserError if the file has been truncated."""
    count = ITEM_BYTES[entry.dtype] * int(np.prod(entry.shape, dtype=np.int64))
    result = np.fromfile(entry.path, np.uint8, count, offset=entry.offset)
    if result.size != count:
        raise UserError(f"{entry.path} ended while it was read: download or copy the shard again.")
    return result
