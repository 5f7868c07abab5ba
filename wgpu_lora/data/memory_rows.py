"""Rows from Python: a list of dicts, an iterator, or a dataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wgpu_lora.data.json_rows import MAX_LINE, parsed
from wgpu_lora.data.json_values import dense, kind_of
from wgpu_lora.data.row_formats import RowFormats
from wgpu_lora.data.source import BadRow, NoRowsError, RowPosition, Rows, Source
from wgpu_lora.errors import UserError
from wgpu_lora.names.text import count_noun

ROWS = "rows from Python"  # stands for the path in records of options
_MAX_DEPTH = 100


@dataclass
class PythonRows:
    """Rows from Python. argument: name of the caller's argument."""

    items: Iterable[Any]
    argument: str = "data"
    notes: tuple[str, ...] = ()
    _count: int | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        return ROWS

    @property
    def path(self) -> str:
        return ROWS if self._count is None else f"{count_noun(self._count, 'row')} from Python"

    @property
    def is_sealed(self) -> bool:
        return False

    @property
    def display_name(self) -> str:
        return f"'{self.argument}'"

    def rows(self, formats: RowFormats[Any]) -> Rows:
        count = 0
        for count, row in enumerate(self.items, start=1):
            yield RowPosition("row", count), _checked(row, hasattr(self.items, "column_names"))
        if not count:
            note = "; an iterator can be read only once" if iter(self.items) is self.items else ""
            raise UserError(f"'{self.argument}' has no rows{note}: give at least one dict.")
        self._count = count

    def locate(self, position: RowPosition) -> str:
        return f"{position} of {self.argument}"

    def digest(self) -> None:
        return None


def split_python_rows(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Source]]:
    """Split options into plain ones, and the rows given as `data` and `eval_data`.

    Raises:
        UserError: one of the two is neither a path nor rows.
    """
    plain, rows = dict(options), dict[str, Source]()
    for name in ("data", "eval_data"):
        value = options.get(name)
        if value is not None and not isinstance(value, str | Path):
            plain[name], rows[name] = ROWS, python_source(value, name)
    return plain, rows


def python_source(value: Any, argument: str = "data") -> Source:
    """The source of rows given as an argument.

    Raises:
        UserError: the argument is not an iterable of rows.
    """
    expected = f"'{argument}' must be a path, or rows: a list of dicts, or an iterator of them"
    if isinstance(value, Mapping):
        splits = [str(name) for name, column in value.items() if hasattr(column, "column_names")]
        hint = f"choose one of its splits, {', '.join(splits[:8])}" if splits else "not one dict"
        raise UserError(f"{expected}; {hint}.")
    if hasattr(value, "to_dict") and hasattr(value, "columns"):
        raise UserError(f'{expected}; of a data frame, give data.to_dict("records").')
    try:
        iter(value)
    except TypeError:
        raise UserError(f"{expected}, not {kind_of(value)}.") from None
    if isinstance(value, bytes | bytearray):
        raise UserError(f"{expected}, not {kind_of(value)}.")
    return PythonRows(value, argument)


def _checked(row: Any, of_table: bool) -> dict[str, Any] | BadRow:
    if not isinstance(row, Mapping):
        return BadRow(f"it is {kind_of(row)}, but a row must be a dict.", repr(row)[:1000])
    try:
        plain = _plain(row, 0)
    except ValueError as error:
        return BadRow(f"{error}.", repr(row)[:1000])
    return {key: dense(value) for key, value in plain.items()} if of_table else plain


def _plain(value: Any, depth: int) -> Any:
    """Convert a value to JSON types: arrays and tuples become lists. Raises ValueError if that is impossible."""
    if depth > _MAX_DEPTH:
        raise ValueError("it is nested too deeply; a row needs only a few levels")
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("a key is not a string; all keys of a row must be strings")
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, str):
        return str(value)
    return value.tolist() if hasattr(value, "tolist") else value  # NumPy and PyTorch


class SealedRows:
    """The lines of a buffer, which is overwritten by `wipe`.

    Args:
        name: of the data, for messages and records. sha256: what stands for the data in records.
    """

    def __init__(self, content: bytearray, name: str, sha256: str):
        self._content, self._sha256, self.name = content, sha256, name
        self.notes: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return self.name

    @property
    def display_name(self) -> str:
        return self.name

    @property
    def is_sealed(self) -> bool:
        return True

    def rows(self, formats: RowFormats[Any]) -> Rows:
        if self._content[:2] == b"\x1f\x8b":
            raise UserError(f"{self.name} holds a gzip file: seal the JSONL file itself.")
        empty = True
        for position, _, row in parsed(self._lines()):
            empty = False
            yield position, row
        if empty:
            raise NoRowsError(f"{self.name} is empty; at least one row is needed.")

    def _lines(self) -> Iterator[bytes]:
        """The lines; those longer than MAX_LINE are truncated to MAX_LINE + 1 bytes."""
        start = 0
        while start < len(self._content):
            end = self._content.find(b"\n", start) + 1 or len(self._content)
            yield bytes(self._content[start : min(end, start + MAX_LINE + 1)])
            start = end

    def locate(self, position: RowPosition) -> str:
        return f"{self.name}, {position}"

    def digest(self) -> str:
        return self._sha256

    def wipe(self) -> int:
        """Overwrite the content; returns its bytes."""
        self._content[:] = bytes(len(self._content))
        return len(self._content)
