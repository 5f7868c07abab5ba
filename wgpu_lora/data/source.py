"""What training data are to the rest: a name, rows with their places, and a digest, wherever they come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from wgpu_lora.errors import UserError


class Place(NamedTuple):
    """Where a row is. unit: 'line' or 'row'; number: from 1; line: the one that a row of another unit begins in."""

    unit: str
    number: int
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.unit} {self.number}" + (f" (line {self.line})" if self.line and self.line > 1 else "")


@dataclass(frozen=True)
class Problem:
    """Why a row cannot be used. content: the row, or the text that is none, as far as it can be kept."""

    reason: str
    content: Any = None


Rows = Iterator[tuple[Place, dict[str, Any] | Problem]]


class Source(Protocol):
    """Training data that somebody named or gave."""

    @property
    def name(self) -> str:
        """What a summary begins with: a file's name, say."""

    @property
    def path(self) -> str:
        """What run.json calls it."""

    @property
    def called(self) -> str:
        """What messages call it."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know about how it is read."""

    def rows(self) -> Rows:
        """The rows in their order, one by one; one that cannot be read is a Problem.

        Raises:
            UserError: nothing can be read, or nothing more.
        """

    def where(self, place: Place) -> str:
        """A place, and in what."""

    def digest(self) -> str | None:
        """SHA-256, hexadecimal, of the bytes that hold the rows; None where there is nothing but the rows."""


def strict_rows(source: Source) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The rows of a source in which every row has to be right.

    Raises:
        UserError: also where a row cannot be read, with its place.
    """
    for place, row in source.rows():
        if isinstance(row, Problem):
            raise UserError(f"{source.where(place)}: {row.reason}")
        yield place, row


def kind_of(value: Any) -> str:
    """A JSON value in the words of an error message."""
    if isinstance(value, list | dict):
        name = "list" if isinstance(value, list) else "object"
        return f"an empty {name}" if not value else "a list" if name == "list" else "an object"
    if isinstance(value, float) and value != value:
        return "NaN (a table's empty cell?)"
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), type(value).__name__)


def dense(value: Any) -> Any:
    """A value without the null fields of its objects: a table gives every object the fields of all."""
    if isinstance(value, dict):
        return {key: dense(item) for key, item in value.items() if item is not None}
    return [dense(item) for item in value] if isinstance(value, list) else value
