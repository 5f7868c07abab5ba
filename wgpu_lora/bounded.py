"""Untrusted files: JSON and TOML read within bounds of time and memory, and links that lead elsewhere."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError

# Python takes some 100 bytes for each value, which is far more than it took in the file. Both bounds are beyond what
# models have: 64 shards' index takes 0.1 MB, a tokenizer's settings 1 MB, and a tensor of a header 9 of these signs.
MAX_JSON_BYTES = 8 << 20
MAX_JSON_PARTS = 200_000
MAX_TOML_BYTES, MAX_TOML_DOTS, MAX_LINE_DOTS = 1 << 18, 20_000, 256


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES, max_parts: int = MAX_JSON_PARTS) -> dict[str, Any]:
    """The JSON object in a file; UserError when it is missing, unreadable, too large or something else."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for ever
            raise UserError(f"{path} is not a regular file: restore it.")
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: give a directory that holds {path.name}.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): restore the file.") from None
    return parse_object(data, str(path), max_bytes, max_parts)


def parse_object(
    data: bytes, where: str, max_bytes: int = MAX_JSON_BYTES, max_parts: int = MAX_JSON_PARTS
) -> dict[str, Any]:
    """The JSON object in these bytes; `where` begins the UserError about one too large, twice a key, or not JSON."""
    if len(data) > max_bytes:
        raise UserError(f"{where} is longer than {max_bytes:,} bytes: use the file of the model's source.")
    if sum(map(data.count, (b"[", b"{", b","))) > max_parts:
        raise UserError(f"{where} has more than {max_parts:,} values: use the file of the model's source.")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=object_of)
        if rb"\ud" in data.lower():  # half a character, escaped, cannot be written anywhere
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise UserError(f"{where} is nested too deeply: use the file that the model was published with.") from None
    except ValueError as error:
        raise UserError(f"{where} cannot be read as JSON ({error}): restore the file.") from None
    if not isinstance(value, dict):
        raise UserError(f"{where} holds a JSON {type(value).__name__}, expected an object: restore the file.")
    return value


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The values of a TOML file; `what` it is begins the UserError about one that cannot be read, or is none."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TOML_BYTES + 1)
    except OSError as error:
        raise UserError(f"{what} {path} cannot be read ({error.strerror}).") from None
    if len(data) > MAX_TOML_BYTES:
        raise UserError(f"{what} {path} is longer than {MAX_TOML_BYTES:,} bytes: shorten it.")
    # Keys of many parts cost Python's reader their square.
    if data.count(b".") > MAX_TOML_DOTS or any(line.count(b".") > MAX_LINE_DOTS for line in data.splitlines()):
        raise UserError(f"{what} {path} has names of too many parts: write one option a line.")
    try:
        values = tomllib.loads(data.decode("utf-8"))
        if not _within_64_bits(values):
            raise ValueError("a whole number is beyond 64 bits")
        return values
    except RecursionError:
        raise UserError(f"{what} {path} is nested too deeply: write one option a line.") from None
    except ValueError as error:
        raise UserError(f"{what} {path} is not valid TOML: {error}.") from None


def _within_64_bits(value: Any) -> bool:
    """Whether all whole numbers are: larger ones need not even be possible to print."""
    if isinstance(value, dict):
        return all(map(_within_64_bits, value.values()))
    if isinstance(value, list):
        return all(map(_within_64_bits, value))
    return not isinstance(value, int) or abs(value) < 1 << 63


def is_name(text: str) -> bool:
    """Whether a text can be a path here and be written down: it has no NUL, and is UTF-8."""
    try:
        return b"\0" not in text.encode("utf-8")
    except UnicodeEncodeError:  # bytes of the file system that are not
        return False


def check_name(path: Path) -> None:
    """UserError unless a path can be written down in what lies there: cards, records and indices name it."""
    if not is_name(str(path)):
        raise UserError(f"{str(path)!a:.200} is no name in UTF-8: give that file or directory another.")


def printable(text: str, keep: str = "") -> str:
    """Text with what a terminal would act upon, or not take, shown as its code; the characters of `keep` stay."""
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object from its pairs, for `json.loads`; ValueError where a key stands twice in it."""
    value = dict(pairs)
    if len(value) != len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r} stands twice in one object; keep one of the two")
    return value


def leads_out(path: Path, directory: Path) -> bool:
    """Whether a file lies outside of the directory that it is found in: a link may lead anywhere.

    The hub's cache keeps a model's files beside its snapshots, in `blobs`, and links them.
    """
    root, target = directory.resolve(), path.resolve()
    cached = root.parent.name == "snapshots" and target.is_relative_to(root.parent.parent / "blobs")
    return not (target.is_relative_to(root) or cached)
