"""Read JSONL: one JSON object per line, errors with line numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from wgpu_lora.data.compressed_files import opened
from wgpu_lora.data.json_values import kind_of
from wgpu_lora.data.row_formats import RowFormats
from wgpu_lora.data.source import BadRow, NoRowsError, RowPosition, Rows
from wgpu_lora.errors import UserError
from wgpu_lora.files.json_files import object_with_unique_keys

MAX_LINE = 16 << 20  # bytes; in the worst case (nested lists) Python takes half a gigabyte for them
MAX_BLANK = 1 << 20  # blank lines of a file
MAX_SHOWN = 1 << 16  # bytes of an unparsable row that are kept
BOM = b"\xef\xbb\xbf"


def read_lines(path: Path, formats: RowFormats[Any]) -> Rows:
    """Yield every line that is not blank.

    A line that is too long, not UTF-8, not a JSON object, or repeats a key is a BadRow.

    Raises:
        UserError: the file cannot be read, is empty, or is a JSON object over several lines.
    """
    first = True
    with opened(path) as file:
        for position, line, row in parsed(_lines(file)):
            if first and isinstance(row, BadRow) and (wrong := _multiline_advice(path, line, formats)):
                raise UserError(f"{path} {wrong}.")
            first = False
            yield position, row
    if first:
        raise NoRowsError(f"{path} is empty; at least one row is needed.")


def parsed(lines: Iterable[bytes]) -> Iterator[tuple[RowPosition, bytes, dict[str, Any] | BadRow]]:
    """The rows of all lines that are not blank, with their positions and their lines."""
    blank = 0
    for number, line in enumerate(lines, start=1):
        if number == 1:
            line = line.removeprefix(BOM)
        if len(line) > MAX_LINE or line.strip():
            yield RowPosition("line", number), line, parse_line(line)
        elif (blank := blank + 1) > MAX_BLANK:
            raise UserError(too_many_blank_lines(number))


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines; those longer than MAX_LINE are truncated to MAX_LINE + 1 bytes."""
    while line := file.readline(MAX_LINE + 1):
        yield line
        while len(line) > MAX_LINE and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE + 1)


def parse_line(line: bytes) -> dict[str, Any] | BadRow:
    """Parse the bytes of a row."""
    if len(line) > MAX_LINE:
        return too_long()
    if not line.strip():  # only elements of a list: blank lines are skipped
        return BadRow("there is nothing between two commas, or after the last; remove the comma.")
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=object_with_unique_keys, parse_constant=_no_constant)
        if b"\\u" in line:  # an escape may be a lone surrogate, which no tokenizer accepts
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"not valid UTF-8 (byte {error.start + 1}); save the file as UTF-8."
    except UnicodeEncodeError:
        reason = "a \\u escape is a lone surrogate; write the character out."
    except json.JSONDecodeError as error:
        tail = error.doc[error.pos :].strip() if error.msg == "Extra data" else ""
        if tail == ",":
            reason = "there is a comma after the object; remove it, or put all rows into one list, as [...]."
        elif tail.startswith("{"):
            reason = "there are several JSON objects in one line; write one per line."
        else:
            reason = f"not JSON: {describe(error)}; each row must be one JSON object."
    except RecursionError:
        reason = "nested too deeply to read; a row needs only a few levels."
    except ValueError as error:
        digits = "set_int_max_str_digits" in str(error)
        reason = "a number has too many digits; write it as text." if digits else f"{error}."
    else:
        if isinstance(row, dict):
            return row
        return BadRow(f"it is {kind_of(row)}, but each row must be one JSON object.", row)
    return BadRow(reason, line[:MAX_SHOWN].decode("utf-8", "replace").strip())


def too_many_blank_lines(number: int) -> str:
    return f"The data have more than {MAX_BLANK:,} blank lines up to line {number:,}: remove them."


def too_long() -> BadRow:
    return BadRow(f"longer than {MAX_LINE >> 20} MiB; split the row into several.")


def describe(error: json.JSONDecodeError) -> str:
    """A JSON error as part of a sentence: 'invalid control character at character 216'."""
    text = error.msg.removesuffix(" at").removesuffix(" starting")
    return f"{text[:1].lower()}{text[1:]} at character {error.pos + 1}"


def _multiline_advice(path: Path, line: bytes, formats: RowFormats[Any]) -> str | None:
    """Advice for a file with JSON objects over several lines; None for other files."""
    if not line.lstrip().startswith(b"{"):
        return None
    with opened(path) as file:
        data = file.read(MAX_LINE + 1)
    if len(data) <= MAX_LINE and isinstance(row := parse_line(data.removeprefix(BOM)), dict):
        return f"is one JSON object over several lines; {formats.shape_advice(row) or 'put it into a list, as [{...}]'}"
    if line.strip() == b"{":
        return "has JSON objects over several lines; write one per line (`jq -c . FILE`), or all of them as one list"
    return None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON; use a number or null")


_CHUNK, _MOST = 1 << 16, 1 << 20
_NO_SPACE = re.compile(rb"[^ \t\r\n]")
_OUTSIDE = re.compile(rb'["\[\]{},]')  # ends an element, changes the depth or begins a string
_WITHIN = re.compile(rb'["\[\]{}]')
_STRING = re.compile(rb'"|\\.|\\\Z', re.DOTALL)


def read_array(path: Path, formats: RowFormats[Any] | None = None) -> Rows:
    """Yield the elements of a JSON array, numbered from 1, with their first lines.

    An element that cannot be parsed is a BadRow, as for a line of JSONL. `formats` is not used: objects have keys.

    Raises:
        UserError: the file cannot be read, or an element does not end.
    """
    number = 0
    with opened(path) as file:
        for number, (line, element) in enumerate(_elements(file, path), start=1):
            yield RowPosition("row", number, line), too_long() if element is None else parse_line(element)
    if not number:
        raise NoRowsError(f"{path} is an empty list; at least one row is needed.")


def _elements(file: IO[bytes], path: Path) -> Iterator[tuple[int, bytes | None]]:
    """(line, bytes) of each element; the bytes are None if it is too long."""
    buffer = file.read(_CHUNK).removeprefix(BOM)
    begin = at = buffer.index(b"[") + 1  # start of the element; position of the search
    line = 1 + buffer.count(b"\n", 0, begin)  # of `begin`
    depth, in_string, is_long, count = 0, False, False, 0
    while True:
        match = (_STRING if in_string else _WITHIN if depth else _OUTSIDE).search(buffer, at)
        if match is None or match[0] == b"\\":
            at = match.start() if match else len(buffer)
            if at - begin > MAX_LINE:
                is_long = True
                line += buffer.count(b"\n", begin, at)
                begin = at
            chunk = file.read(min(max(_CHUNK, at - begin), _MOST))  # more for long elements
            if not chunk:
                raise UserError(
                    f"{path} is a list that is not closed: row {count + 1}, line {_behind_space(buffer, begin, line)}, "
                    "lacks a quotation mark or a bracket, or the file is truncated."
                )
            buffer, at, begin = buffer[begin:] + chunk, at - begin, 0
            continue
        mark, at = match[0], match.end()
        if in_string:
            in_string = mark != b'"'
        elif mark == b'"':
            in_string = True
        elif mark in b"[{":
            depth += 1
        elif depth:
            depth -= 1
        elif mark == b"}":
            line_number = line + buffer.count(b"\n", begin, at)
            raise UserError(f"{path}, line {line_number}: there is one closing brace too many.")
        else:
            element = buffer[begin : at - 1].strip()
            if element or count or mark == b",":
                yield _behind_space(buffer, begin, line), None if is_long or len(element) > MAX_LINE else element
            line, begin, is_long, count = line + buffer.count(b"\n", begin, at), at, False, count + 1
            if mark == b"]":
                break
    while not (tail := buffer[begin:].lstrip()) and (chunk := file.read(_CHUNK)):
        line, buffer, begin = line + buffer.count(b"\n", begin), chunk, 0
    if tail:
        raise UserError(
            f"{path} has text after the end of its list, in line {_behind_space(buffer, begin, line)}; "
            "give one JSON list, or one object per line."
        )


def _behind_space(buffer: bytes, begin: int, line: int) -> int:
    """The line of the first non-space after `begin`, which is in `line`."""
    match = _NO_SPACE.search(buffer, begin)
    return line + buffer.count(b"\n", begin, match.start() if match else len(buffer))
