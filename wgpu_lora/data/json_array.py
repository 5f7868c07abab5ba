"""Read a JSON array of rows one element at a time, so that a file may be larger than memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from wgpu_lora.data.columns import RowFormats
from wgpu_lora.data.jsonl import BOM, MAX_LINE, parse_line, too_long
from wgpu_lora.data.opening import opened
from wgpu_lora.data.source import NoRowsError, Place, Rows
from wgpu_lora.errors import UserError

_CHUNK, _MOST = 1 << 16, 1 << 20
_NO_SPACE = re.compile(rb"[^ \t\r\n]")
_OUTSIDE = re.compile(rb'["\[\]{},]')  # ends an element, changes the depth or begins a string
_WITHIN = re.compile(rb'["\[\]{}]')
_STRING = re.compile(rb'"|\\.|\\\Z', re.DOTALL)


def read_array(path: Path, formats: RowFormats[Any] | None = None) -> Rows:
    """Yield the elements of a JSON array, numbered from 1, with their first lines.

    An element that cannot be parsed is a Problem, as for a line of JSONL. `formats` is not used: objects have keys.

    Raises:
        UserError: the file cannot be read, or an element does not end.
    """
    number = 0
    with opened(path) as file:
        for number, (line, element) in enumerate(_elements(file, path), start=1):
            yield Place("row", number, line), too_long() if element is None else parse_line(element)
    if not number:
        raise NoRowsError(f"{path} is an empty list; at least one row is needed.")


def _elements(file: IO[bytes], path: Path) -> Iterator[tuple[int, bytes | None]]:
    """(line, bytes) of each element; the bytes are None if it is too long."""
    held = file.read(_CHUNK).removeprefix(BOM)
    begin = at = held.index(b"[") + 1  # start of the element; position of the search
    line = 1 + held.count(b"\n", 0, begin)  # of `begin`
    depth, in_string, is_long, count = 0, False, False, 0
    while True:
        found = (_STRING if in_string else _WITHIN if depth else _OUTSIDE).search(held, at)
        if found is None or found[0] == b"\\":
            at = found.start() if found else len(held)
            if at - begin > MAX_LINE:
                is_long = True
                line += held.count(b"\n", begin, at)
                begin = at
            more = file.read(min(max(_CHUNK, at - begin), _MOST))  # more for long elements
            if not more:
                raise UserError(
                    f"{path} is a list that is not closed: row {count + 1}, line {_behind_space(held, begin, line)}, "
                    "lacks a quotation mark or a bracket, or the file is truncated."
                )
            held, at, begin = held[begin:] + more, at - begin, 0
            continue
        mark, at = found[0], found.end()
        if in_string:
            in_string = mark != b'"'
        elif mark == b'"':
            in_string = True
        elif mark in b"[{":
            depth += 1
        elif depth:
            depth -= 1
        elif mark == b"}":
            here = line + held.count(b"\n", begin, at)
            raise UserError(f"{path}, line {here}: there is one closing brace too many.")
        else:
            element = held[begin : at - 1].strip()
            if element or count or mark == b",":
                yield _behind_space(held, begin, line), None if is_long or len(element) > MAX_LINE else element
            line, begin, is_long, count = line + held.count(b"\n", begin, at), at, False, count + 1
            if mark == b"]":
                break
    while not (rest := held[begin:].lstrip()) and (more := file.read(_CHUNK)):
        line, held, begin = line + held.count(b"\n", begin), more, 0
    if rest:
        raise UserError(
            f"{path} has text after the end of its list, in line {_behind_space(held, begin, line)}; "
            "give one JSON list, or one object per line."
        )


def _behind_space(held: bytes, begin: int, line: int) -> int:
    """The line of the first non-space after `begin`, which is in `line`."""
    found = _NO_SPACE.search(held, begin)
    return line + held.count(b"\n", begin, found.start() if found else len(held))
