"""The interface of training data: a name, rows with their positions, and a digest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from wgpu_lora.data.row_formats import RowFormats
from wgpu_lora.errors import UserError


class RowPosition(NamedTuple):
    """The position of a row. unit: 'line' or 'row'; number: from 1; line: first line of a row in a JSON array."""

    unit: str
    number: int
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.unit} {self.number}" + (f" (line {self.line})" if self.line and self.line > 1 else "")


@dataclass(frozen=True)
class BadRow:
    """An unusable row. content: the row, or its text if it cannot be parsed, possibly shortened."""

    reason: str
    content: Any = None


class NoRowsError(UserError):
    """A source is empty."""


Rows = Iterator[tuple[RowPosition, dict[str, Any] | BadRow]]


class Source(Protocol):
    """Training data from a file, the hub or Python."""

    @property
    def name(self) -> str:
        """Name for summaries, such as a file's name."""

    @property
    def path(self) -> str:
        """Name for run.json."""

    @property
    def display_name(self) -> str:
        """Name for messages."""

    @property
    def is_sealed(self) -> bool:
        """Whether messages must not repeat anything of the rows."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user about how the data are read."""

    def rows(self, formats: RowFormats[Any]) -> Rows:
        """Yield the rows in order; a row that cannot be read is a BadRow.

        Args:
            formats: those that are accepted.

        Raises:
            UserError: the data cannot be read (any further), or the columns of a table fit no format.
        """

    def locate(self, position: RowPosition) -> str:
        """A position with the name of the data, for messages."""

    def digest(self) -> str | None:
        """SHA-256 of the file, hexadecimal; None if there is no file."""


def strict_rows(source: Source, formats: RowFormats[Any]) -> Iterator[tuple[RowPosition, dict[str, Any]]]:
    """Yield the rows of a source in which all rows must be valid.

    Raises:
        UserError: as for `Source.rows`, or a row cannot be read; names its position.
    """
    for position, row in source.rows(formats):
        if isinstance(row, BadRow):
            raise UserError(f"{source.locate(position)}: {row.reason}")
        yield position, row
