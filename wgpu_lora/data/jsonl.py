"""Read JSONL: one JSON object per line, errors with line numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from wgpu_lora.bounded import object_of
from wgpu_lora.data.columns import RowFormats
from wgpu_lora.data.opening import opened
from wgpu_lora.data.source import NoRowsError, Place, Problem, Rows
from wgpu_lora.data.values import kind_of
from wgpu_lora.errors import UserError

MAX_LINE = 16 << 20  # bytes; in the worst case (nested lists) Python takes half a gigabyte for them
MAX_BLANK = 1 << 20  # blank lines of a file
MAX_SHOWN = 1 << 16  # bytes of an unparsable row that are kept
BOM = b"\xef\xbb\xbf"


def read_lines(path: Path, formats: RowFormats[Any]) -> Rows:
    """Yield every line that is not blank.

    A line that is too long, not UTF-8, not a JSON object, or repeats a key is a Problem.

    Raises:
        UserError: the file cannot be read, is empty, or is a JSON object over several lines.
    """
    first = True
    with opened(path) as file:
        for place, line, row in parsed(_lines(file)):
            if first and isinstance(row, Problem) and (wrong := _of_several_lines(path, line, formats)):
                raise UserError(f"{path} {wrong}.")
            first = False
            yield place, row
    if first:
        raise NoRowsError(f"{path} is empty; at least one row is needed.")


def parsed(lines: Iterable[bytes]) -> Iterator[tuple[Place, bytes, dict[str, Any] | Problem]]:
    """The rows of all lines that are not blank, with their places and their lines."""
    blank = 0
    for number, line in enumerate(lines, start=1):
        if number == 1:
            line = line.removeprefix(BOM)
        if len(line) > MAX_LINE or line.strip():
            yield Place("line", number), line, parse_line(line)
        elif (blank := blank + 1) > MAX_BLANK:
            raise UserError(too_many_blank_lines(number))


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines; those longer than MAX_LINE are truncated to MAX_LINE + 1 bytes."""
    while line := file.readline(MAX_LINE + 1):
        yield line
        while len(line) > MAX_LINE and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE + 1)


def parse_line(line: bytes) -> dict[str, Any] | Problem:
    """Parse the bytes of a row."""
    if len(line) > MAX_LINE:
        return too_long()
    if not line.strip():  # only elements of a list: blank lines are skipped
        return Problem("there is nothing between two commas, or after the last; remove the comma.")
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=object_of, parse_constant=_no_constant)
        if b"\\u" in line:  # an escape may be a lone surrogate, which no tokenizer accepts
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"not valid UTF-8 (byte {error.start + 1}); save the file as UTF-8."
    except UnicodeEncodeError:
        reason = "a \\u escape is a lone surrogate; write the character out."
    except json.JSONDecodeError as error:
        rest = error.doc[error.pos :].strip() if error.msg == "Extra data" else ""
        if rest == ",":
            reason = "there is a comma after the object; remove it, or put all rows into one list, as [...]."
        elif rest.startswith("{"):
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
        return Problem(f"it is {kind_of(row)}, but each row must be one JSON object.", row)
    return Problem(reason, line[:MAX_SHOWN].decode("utf-8", "replace").strip())


def too_many_blank_lines(number: int) -> str:
    return f"The data have more than {MAX_BLANK:,} blank lines up to line {number:,}: remove them."


def too_long() -> Problem:
    return Problem(f"longer than {MAX_LINE >> 20} MiB; split the row into several.")


def describe(error: json.JSONDecodeError) -> str:
    """A JSON error as part of a sentence: 'invalid control character at character 216'."""
    text = error.msg.removesuffix(" at").removesuffix(" starting")
    return f"{text[:1].lower()}{text[1:]} at character {error.pos + 1}"


def _of_several_lines(path: Path, line: bytes, formats: RowFormats[Any]) -> str | None:
    """Advice for a file with JSON objects over several lines; None for other files."""
    if not line.lstrip().startswith(b"{"):
        return None
    with opened(path) as file:
        data = file.read(MAX_LINE + 1)
    if len(data) <= MAX_LINE and isinstance(row := parse_line(data.removeprefix(BOM)), dict):
        return f"is one JSON object over several lines; {formats.remedy(row) or 'put it into a list, as [{...}]'}"
    if line.strip() == b"{":
        return "has JSON objects over several lines; write one per line (`jq -c . FILE`), or all of them as one list"
    return None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON; use a number or null")
