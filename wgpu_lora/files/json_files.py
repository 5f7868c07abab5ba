"""JSON and TOML: untrusted files read within limits of time and memory, and JSON written without NaN."""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError, reason
from wgpu_lora.files.paths import open_file

# Python takes about 100 bytes for each value, far more than the file does. Real models stay well below both limits: the
# index of 64 shards takes 0.1 MB, a tokenizer's settings 1 MB, and each tensor of a header counts as 9 values.
MAX_JSON_BYTES = 8 << 20
MAX_JSON_PARTS = 200_000
MAX_TOML_BYTES, MAX_TOML_DOTS, MAX_LINE_DOTS = 1 << 18, 20_000, 256


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        UserError: the file is missing, unreadable, too large, or not a JSON object.
    """
    return parse_object(read_bytes(path, max_bytes), str(path), max_bytes)


def read_bytes(path: Path, max_bytes: int | None = None) -> bytes:
    """The content of a file; of one that is larger than `max_bytes`, one byte more.

    Raises:
        UserError: the file is missing or unreadable.
    """
    try:
        if path.exists() and not path.is_file():  # opening a pipe would block
            raise UserError(f"{path} is not a regular file: restore it.")
        with path.open("rb") as file:
            return file.read() if max_bytes is None else file.read(max_bytes + 1)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: give a directory that holds {path.name}.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): restore the file.") from None


def parse_object(
    data: bytes,
    where: str,
    max_bytes: int = MAX_JSON_BYTES,
    max_parts: int = MAX_JSON_PARTS,
    cure: str = "restore the file",
) -> dict[str, Any]:
    """Parse bytes as a JSON object.

    Args:
        where: start of the error messages, such as a path. cure: their end.

    Raises:
        UserError: the bytes are too long, repeat a key, or are not a JSON object.
    """
    if len(data) > max_bytes:
        raise UserError(f"{where} is longer than {max_bytes:,} bytes: {cure}.")
    if sum(map(data.count, (b"[", b"{", b","))) > max_parts:
        raise UserError(f"{where} has more than {max_parts:,} values: {cure}.")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=object_with_unique_keys)
        if rb"\ud" in data.lower():  # an escaped lone surrogate cannot be encoded
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise UserError(f"{where} is nested too deeply: {cure}.") from None
    except ValueError as error:
        raise UserError(f"{where} cannot be read as JSON ({error}): {cure}.") from None
    if not isinstance(value, dict):
        raise UserError(f"{where} holds a JSON {type(value).__name__}, expected an object: {cure}.")
    return value


def object_with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object from its pairs (`object_pairs_hook` of `json.loads`); ValueError if a key is repeated."""
    value = dict(pairs)
    if len(value) != len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r} is repeated in one object; keep one of the two")
    return value


def read_toml(path: Path, kind: str) -> dict[str, Any]:
    """Read a TOML file.

    Args:
        kind: what kind of file it is; starts the error messages.

    Raises:
        UserError: the file cannot be read, is too long, or is not valid TOML.
    """
    return parse_toml(small_file(path, kind), f"{kind} {path}")


def small_file(path: str | Path, kind: str, max_bytes: int = MAX_TOML_BYTES) -> bytes:
    """The content of a file that a person wrote, of which too much is refused. Other arguments and errors as for
    `read_toml`."""
    try:
        with open_file(path) as file:
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        raise UserError(f"{kind} {path} cannot be read ({reason(error)}): check the path.") from None
    if len(data) > max_bytes:
        raise UserError(f"{kind} {path} is longer than {max_bytes:,} bytes: shorten it.")
    return data


def parse_toml(data: bytes, where: str) -> dict[str, Any]:
    """Parse bytes as TOML; `where` starts the error messages. Raises UserError."""
    # tomllib takes quadratic time for keys with many dots.
    if data.count(b".") > MAX_TOML_DOTS or any(line.count(b".") > MAX_LINE_DOTS for line in data.splitlines()):
        raise UserError(f"{where} has names with too many dots: write one option per line.")
    try:
        values = tomllib.loads(data.decode("utf-8"))
        if not _within_64_bits(values):
            raise ValueError("an integer does not fit into 64 bits")
        return values
    except RecursionError:
        raise UserError(f"{where} is nested too deeply: write one option per line.") from None
    except ValueError as error:
        raise UserError(f"{where} is not valid TOML: {error}.") from None


def _within_64_bits(value: Any) -> bool:
    """Whether all integers fit into 64 bits: Python refuses to print very large ones."""
    if isinstance(value, dict):
        return all(map(_within_64_bits, value.values()))
    if isinstance(value, list):
        return all(map(_within_64_bits, value))
    return not isinstance(value, int) or abs(value) < 1 << 63


def to_json(value: Any, **options: Any) -> str:
    """`json.dumps(value, **options)`, with null for every non-finite number."""
    return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
