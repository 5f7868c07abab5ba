"""Reading JSONL: one JSON object to a line, every mistake told with its line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wgpu_lora.bounded import object_of
from wgpu_lora.errors import UserError

MAX_LINE = 16 << 20  # bytes; as lists of lists, the worst there is, Python takes half a gigabyte for them


def resolve_data(path: Path) -> tuple[Path, Path | None]:
    """The training file and, where there is one, the validation file: `path` itself or what is in that folder.

    Raises:
        UserError: there is nothing at `path`, or the folder has no train.jsonl.
    """
    path = Path(path)
    if path.is_dir():
        train, valid = path / "train.jsonl", path / "valid.jsonl"
        if not train.is_file():
            raise UserError(f"The folder {path} has no train.jsonl; name the file itself or rename it to that.")
        return train, valid if valid.is_file() else None
    if not path.is_file():
        wrong = f"{path} is not a regular file" if path.exists() else f"There is no data at {path}"
        raise UserError(f"{wrong}; give a .jsonl file or a folder with a train.jsonl.")
    return path, None


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number from 1, object) for every line that is not blank, reading line by line.

    Raises:
        UserError: the file cannot be read or is empty, or a line is too long, not UTF-8, not JSON, not an object,
            or names a key twice.
    """
    empty = True
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), start=1):
                if len(line) > MAX_LINE:
                    raise UserError(
                        f"{path}, line {number}: longer than {MAX_LINE >> 20} MiB; split the row into several."
                    )
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    empty = False
                    yield number, _parse_line(line, f"{path}, line {number}")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}).") from error
    if empty:
        raise UserError(f"{path} is empty; training needs at least one row.")


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=object_of, parse_constant=_no_constant)
        if b"\\u" in line:  # an escape can spell half of a surrogate pair, which no tokenizer takes
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not valid UTF-8 (byte {error.start + 1}); save the file as UTF-8.") from error
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: a \\u escape is half of a surrogate pair; write the character out.") from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: not JSON ({error.msg}, character {error.pos + 1}); each line must be one JSON object."
        ) from error
    except RecursionError as error:
        raise UserError(f"{where}: nested too deeply to read; a row needs only a few levels.") from error
    except ValueError as error:
        raise UserError(f"{where}: {error}.") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: holds {kind_of(row)}, but each line must be one JSON object.")
    return row


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON; use a number or null")


def kind_of(value: Any) -> str:
    """A JSON value in the words of an error message."""
    if isinstance(value, list | dict):
        name = "list" if isinstance(value, list) else "object"
        return f"an empty {name}" if not value else "a list" if name == "list" else "an object"
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), type(value).__name__)
