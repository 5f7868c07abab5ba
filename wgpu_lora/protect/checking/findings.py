"""What a check found: proven, only claimed, or failed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wgpu_lora.atomic import file_digest
from wgpu_lora.errors import UserError
from wgpu_lora.paths import is_path, links_outside
from wgpu_lora.protect.evidence.chain import read_bytes
from wgpu_lora.text import escape_unprintable

MAX_SHOWN = 70  # characters of a value in a message


@dataclass
class Findings:
    """Sentences without a full stop. A run is verified if none failed."""

    proven: list[str] = field(default_factory=list)
    claimed: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def fail(self, said: str) -> None:
        self.failures.append(escape_unprintable(said))

    def expect(self, what: str, found: Any, expected: Any) -> bool:
        """Fail unless two values are equal; of mappings and lists, each part that differs is named."""
        differing = list(_differences(what, found, expected))
        for where, one, other in differing:
            self.fail(f"{where} is {_shown(one)}, expected {_shown(other)}")
        return not differing

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """What cannot be read, or has another form, fails here, and the check goes on with the next part."""
        try:
            yield
        except UserError as error:
            self.fail(f"{what}: {error.lines[0]}")
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
            self.fail(f"{what} has not the form it must have ({type(error).__name__}: {error!s:.100})")


class Missing:
    """Stands for a value that is not there."""

    def __repr__(self) -> str:
        return "missing"


MISSING = Missing()


def _differences(where: str, found: Any, expected: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        for name in sorted({*found, *expected}, key=str):
            yield from _differences(f"{where}.{name}", found.get(name, MISSING), expected.get(name, MISSING))
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            yield from _differences(f"{where}[{number}]", one, other)
    elif type(found) is not type(expected) or found != expected:
        yield where, found, expected


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def digest_of(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def small_file(directory: Path, name: str, limit: int = 8 << 20) -> bytes:
    """A small file of a run's directory. Raises UserError."""
    return read_bytes(directory / name, limit)


def digest_in(directory: Path, name: str) -> str | None:
    """SHA-256 of a file in a run's directory, whose name is untrusted; None if it is not there.

    Raises:
        UserError: the name leads elsewhere, or the file cannot be read.
    """
    path = directory / name
    if not is_path(name) or not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise UserError(f"{name!a:.80} is not the name of a file of the run: restore the log.")
    if not path.exists():
        return None
    if not path.is_file() or links_outside(path, directory):
        raise UserError(f"{path} is not a regular file of the run: restore it.")
    try:
        return file_digest(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): restore it.") from None
