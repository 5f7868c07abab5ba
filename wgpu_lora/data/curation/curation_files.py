"""Files, folders and globs to sources of rows, in an order that does not depend on the file system."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

from wgpu_lora.data.compressed_files import bare_name
from wgpu_lora.data.curation.row_edits import FILES, VALID
from wgpu_lora.data.huggingface import is_hub_id, is_saved, load_splits
from wgpu_lora.data.row_files import SUFFIXES, file_source
from wgpu_lora.data.source import Source
from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import check_new, check_not_around
from wgpu_lora.files.json_files import to_json
from wgpu_lora.files.paths import check_name, check_path
from wgpu_lora.names.spelling import flag
from wgpu_lora.names.text import count_noun, join_words

REPORT, REJECTED, SCHEMA = "report.json", "rejected.jsonl", "wgpu-lora-data/1"
_SHOWN = 5  # names in a note


@dataclass
class Inputs:
    """sources, with their paths if they are files. notes: on what is not read."""

    sources: list[Source] = field(default_factory=list)
    paths: list[Path | None] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # bytes, 0 if not files


def find_inputs(names: Sequence[str], output: Path, exclude: Sequence[str] = ()) -> Inputs:
    """The sources that are named, each file once.

    Folders are read with all folders in them, in the order of their names; of their files, those with the suffix of a
    format. Results of earlier preparations in them, and hidden files, are left out.

    Raises:
        UserError: a name leads to nothing, a file is not supported, or the output would replace an input.
    """
    result, paths = Inputs(), dict[tuple[int, int], Path]()
    position = output.resolve()
    for name in names:
        if not name.strip():
            raise UserError("An input is empty: give a file, a folder or a pattern such as 'data/*.jsonl'.")
        check_path(name)
        for path in _files_of_name(name, exclude, result):
            if isinstance(path, str):
                _add_dataset(path, result)
                continue
            check_name(path)
            if position == path.resolve() or position in path.resolve().parents:
                raise UserError(f"{path} is in {output}, which would be written: choose another {flag('output')}.")
            status = path.stat()
            file = status.st_dev, status.st_ino
            if file in paths:
                note = "" if path == paths[file] else f" ({paths[file]} is the same file)"
                result.notes.append(f"{path} is given more than once{note}; it is read once")
                continue
            paths[file] = path
            result.sizes.append(status.st_size)
            result.paths.append(path)
            # Whatever is in an empty file, it has no format.
            result.sources.append(file_source(path))
    if not result.sources:
        why = f" ({'; '.join(result.notes)})" if result.notes else ""
        raise UserError(f"There is nothing to read in {join_words(names)}{why}: give files of rows.")
    return result


def _files_of_name(name: str, exclude: Sequence[str], inputs: Inputs) -> Iterator[Path | str]:
    """The files of a name; a dataset as text."""
    path = Path(name)
    if path.is_dir():
        if is_saved(path):
            yield name
            return
        yield from _in_folder(path, exclude, inputs)
        return
    if path.exists():
        if not matches(path, exclude):
            yield path
        return
    if glob.has_magic(name):
        yield from _matching(name, exclude, inputs)
        return
    if is_hub_id(name):
        yield name
        return
    wrong = "is a link that leads nowhere" if path.is_symlink() else "does not exist"
    raise UserError(f"{name} {wrong}: give files of rows, folders, or patterns such as 'data/*.jsonl'.")


def _matching(pattern: str, exclude: Sequence[str], inputs: Inputs) -> Iterator[Path]:
    """The files that match a pattern, and those in folders that match it, unless it names files by **."""
    other_files, number = [], 0
    for path in map(Path, sorted(glob.glob(pattern, recursive=True))):
        if path.is_dir() and "**" not in pattern:
            yield from _in_folder(path, exclude, inputs)
            number += 1
        elif _is_row_file(path) and not matches(path, exclude):
            yield path
            number += 1
        elif not path.is_dir() and not matches(path, exclude):
            other_files.append(str(path))
    if not number:
        raise UserError(f"No file of rows matches {pattern!r}: check the pattern.")
    _note_skipped(other_files, f"that match {pattern!r}", inputs)


def _in_folder(folder: Path, exclude: Sequence[str], inputs: Inputs) -> Iterator[Path]:
    other_files: list[str] = []
    walked: set[tuple[int, int]] = set()
    for position, folders, files in os.walk(folder, followlinks=True, onerror=_unreadable):
        directory = Path(position)
        status = directory.stat()
        if (status.st_dev, status.st_ino) in walked:  # a link to a parent folder
            folders.clear()
            continue
        walked.add((status.st_dev, status.st_ino))
        is_output = is_result(directory)
        if is_output and directory != folder:
            inputs.notes.append(f"{directory} was written by 'data prepare' and is left out; name it to read it")
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = directory / name
            if name.startswith(".") or matches(path, exclude) or (is_output and name in (REPORT, REJECTED)):
                continue
            if _is_row_file(path):
                yield path
            else:
                other_files.append(str(path.relative_to(folder)))
    _note_skipped(other_files, f"in {folder}", inputs)


def _is_row_file(path: Path) -> bool:
    return bare_name(path).suffix.lower() in SUFFIXES and path.is_file()


def _note_skipped(files: Sequence[str], where: str, inputs: Inputs) -> None:
    if files:
        names = join_words(files, limit=_SHOWN)
        inputs.notes.append(f"{count_noun(len(files), 'file')} {where} without the suffix of a format: {names}")


def _unreadable(error: OSError) -> None:
    raise UserError(f"{error.filename} cannot be read ({error.strerror}): fix that, or leave it out.") from error


def matches(path: str | Path, patterns: Sequence[str]) -> bool:
    """Whether a path, or its last part, matches one of the glob patterns."""
    return any(fnmatch(str(path), pattern) or fnmatch(Path(path).name, pattern) for pattern in patterns)


def _add_dataset(name: str, inputs: Inputs) -> None:
    for source in load_splits(name, None, None).values():
        inputs.sources.append(source)
        inputs.paths.append(None)
        inputs.sizes.append(0)


def is_result(folder: Path) -> bool:
    """Whether a folder was written by `data prepare`."""
    try:
        with (folder / REPORT).open("rb") as file:
            head = file.read(64)
    except OSError:
        return False
    return json.dumps({"schema": SCHEMA})[1:-1].encode() in head


WRITTEN = {*FILES.values(), VALID, REPORT, REJECTED}


class LineWriter:
    """A JSONL file that is being written: its rows, bytes and SHA-256."""

    def __init__(self, path: Path) -> None:
        self._path, self._hash = path, hashlib.sha256()
        self._file: IO[bytes] | None = None
        self.rows = self.bytes = 0

    def add(self, line: bytes) -> None:
        """Add a line that ends with a line break."""
        if self._file is None:
            self._file = self._path.open("wb", buffering=1 << 20)
        self._file.write(line)
        self._hash.update(line)
        self.rows, self.bytes = self.rows + 1, self.bytes + len(line)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def facts(self) -> dict[str, Any]:
        return {"rows": self.rows, "bytes": self.bytes, "sha256": self._hash.hexdigest()}


def encoded(row: Any) -> bytes:
    """A row as a line of JSONL; numbers that JSON lacks become null.

    Raises:
        UnicodeEncodeError: a text has a lone surrogate. TypeError: a value is not of JSON. RecursionError.
    """
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = to_json(row, ensure_ascii=False)
    return text.encode() + b"\n"


def refuse_output(output: Path, overwrite: bool) -> None:
    """Raise UserError if a directory exists that may not be replaced."""
    existing_names = {path.name for path in output.iterdir()} if output.is_dir() and not output.is_symlink() else set()
    if existing_names:
        check_not_around(output, flag("output"))
    else:
        check_new(output, flag("output"), directory=True)
        return
    if not is_result(output) or existing_names - WRITTEN:
        names = sorted(existing_names - WRITTEN or existing_names)
        raise UserError(
            f"{output} holds other files ({names[0]!a:.80}): give {flag('output')} a directory that does not exist."
        )
    if not overwrite:
        raise UserError(f"{output} has been prepared already: give {flag('overwrite')} to replace it.")
