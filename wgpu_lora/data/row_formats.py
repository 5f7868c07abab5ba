"""Formats of rows, declared by their columns, and the choice between them by a row's keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

from wgpu_lora.errors import UserError
from wgpu_lora.text import join_words

T = TypeVar("T")
# Columns of other programs' rows that change what is trained on.
MEANINGFUL = ("system", "history", "tools", "functions", "mask", "loss_mask", "images", "videos", "audio")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class ColumnType:
    """The type of a column. `data/column_types.py` has the common ones.

    check: (value, name of the column) -> the value to use; raises UserError, which names the column and not the row.
    is_text: whether a string is a value as it is. Other kinds may be strings in tables, whose columns have a single
        type; empty cells are then missing values.
    cell: converts a cell of a CSV file, or returns it as it is.
    """

    check: Callable[[Any, str], Any]
    is_text: bool = False
    cell: Callable[[str], Any] | None = None


@dataclass(frozen=True)
class RowFormat(Generic[T]):
    """A format of rows: those that have all required columns.

    convert: converts the fields of a row; raises UserError, which names a field and not the row.
    """

    required: Mapping[str, ColumnType]
    convert: Callable[[Fields], T]
    optional: Mapping[str, ColumnType] = field(default_factory=dict)


class Fields:
    """The fields of a row in one format. They are checked when they are read.

    columns: the row itself.
    """

    def __init__(self, columns: Row, form: RowFormat[Any], formats: RowFormats[Any]):
        self.columns, self._form, self._formats = columns, form, formats

    def __getitem__(self, name: str) -> Any:
        """The checked value; None for an optional field that is missing or null. Raises UserError."""
        value = self.columns.get(name)
        kind = self._form.required.get(name) or self._form.optional[name]
        if value is None and name not in self._form.required:
            return None
        try:
            return kind.check(value, name)
        except UserError as error:
            of_objects = isinstance(value, list) and value and isinstance(value[0], dict)
            advice = self._formats.advice(self.columns) if kind.is_text and not of_objects else None
            if not advice:
                raise
            raise UserError(f"{str(error).removesuffix('.')}; {advice}.") from error


@dataclass(frozen=True)
class RowFormats(Generic[T]):
    """The formats of rows that are accepted. A row that fits several is read in the first whose keys are not null.

    other_objectives: advice about rows with these keys, which fit no format, such as what accepts them.
    all_columns: whether tables are read with all their columns, also those that no format uses.
    """

    formats: tuple[RowFormat[T], ...]
    other_objectives: Callable[[Sequence[str]], str | None] = field(default=lambda names: None)
    all_columns: bool = False

    @cached_property
    def columns(self) -> dict[str, ColumnType]:
        """All columns that the formats use; tables are read with these only, unless `all_columns`."""
        result: dict[str, ColumnType] = {}
        for form in self.formats:
            for name, kind in (*form.required.items(), *form.optional.items()):
                result.setdefault(name, kind)
        return result

    def matches(self, names: Sequence[str]) -> bool:
        """Whether rows with these keys fit a format."""
        return self._of(dict.fromkeys(names, "")) is not None

    def _of(self, row: Row) -> RowFormat[T] | None:
        keys = [key for key, value in row.items() if value is not None]
        return next((form for names in (keys, row) for form in self.formats if all(k in names for k in form.required)),
                    None)  # fmt: skip

    def read(self, row: Row) -> T:
        """Convert a row.

        Raises:
            UserError: the row fits no format, or a field is wrong. The message names the field, not the place.
        """
        form = self._of(row)
        if form is None:
            keys = ", ".join(repr(key[:80]) for key in list(row)[:12]) or "none"
            advice = self.advice(row)
            raise UserError(
                f"the row fits no format: its keys are {keys}, but {self._requirements}"
                f"{f'; {advice}' if advice else ''}."
            )
        try:
            return form.convert(Fields(row, form, self))
        except UserError as error:
            advice = self.remedy(row)
            if not advice or advice in str(error):
                raise
            raise UserError(f"{str(error).removesuffix('.')}; {advice}.") from error

    def from_csv(self, cells: Mapping[str, str]) -> dict[str, Any]:
        """A row of a CSV file. Empty cells of columns that are not text are left out.

        The required cells of a format are converted all or not at all: a prompt that only looks like messages is text
        if the completion is.
        """
        kinds = {name: self.columns.get(name) for name in cells}
        row = {name: cell for name, cell in cells.items() if cell or (kind := kinds[name]) is None or kind.is_text}
        form = self._of(row)
        result = {name: kind.cell(row[name]) for name, kind in (form.required if form else {}).items() if kind.cell}
        return row if any(isinstance(value, str) for value in result.values()) else {**row, **result}

    def unused_columns(self, row: Row) -> list[str]:
        """Columns of a row that mean something elsewhere, but are not read in its format."""
        form = self._of(row)
        read = {*form.required, *form.optional} if form else {*MEANINGFUL}
        return [name for name in MEANINGFUL if row.get(name) and name not in read]

    def check_columns(self, names: Sequence[str]) -> None:
        """Raise UserError unless these columns of a table fit a format; the message lists them."""
        if self.matches(names):
            return
        columns = ", ".join(repr(name[:80]) for name in names[:20]) or "none"
        advice = self._other_names(names) or "rename them"
        raise UserError(f"the columns are {columns}, but {self._requirements}; {advice}.")

    def advice(self, row: Row) -> str | None:
        """How to turn a row, or an object that contains rows, into one that fits; None if there is no guess."""
        names = [key for key, value in row.items() if value is not None]
        return self._other_names(names) or self._other_names([*row]) or self.remedy(row)

    def remedy(self, row: Row) -> str | None:
        """Advice for an object that contains rows instead of being one; None if it does not."""
        for name, value in row.items():
            items = value if name not in self.columns and isinstance(value, list) else []
            if items and all(isinstance(item, dict) for item in items):
                return f"its rows seem to be the list {name[:80]!r}: write only that list to the file"
        texts = [value for name, value in row.items() if name in self.columns and self.columns[name].is_text]
        if texts and all(isinstance(value, list) and value and isinstance(value[0], str) for value in texts):
            return "it has columns, not rows: write a list of objects, one for each row"
        if texts and all(isinstance(value, dict) and value and all(map(str.isdigit, value)) for value in texts):
            return "it has columns, not rows: write it with pandas' to_json(..., orient='records', lines=True)"
        return None

    def _other_names(self, names: Sequence[str]) -> str | None:
        if self.matches(names):
            return None
        return self.other_objectives(names) or renaming(names, [[*form.required] for form in self.formats])

    @property
    def _requirements(self) -> str:
        columns = "; ".join(join_words([*form.required]) for form in self.formats)
        return f"the format needs {columns}" if len(self.formats) == 1 else f"the formats need {columns}"


# Other names of keys, the most common first; and of roles.
_QUESTION = ("instruction", "question", "query", "problem", "input", "user", "source")
_ANSWER = ("completion", "output", "answer", "response", "solution", "reply", "target", "assistant")
_OTHER_KEYS = {
    "messages": ("conversations", "dialogue", "dialog", "chat"),
    "conversations": ("conversation",),
    "prompt": _QUESTION,
    "completion": _ANSWER,
    "output": _ANSWER,
}
OTHER_ROLES = dict.fromkeys(("gpt", "bot", "ai", "model", "chatgpt", "bing", "chatbot", "bard", "agent"), "assistant")
OTHER_ROLES |= dict.fromkeys(("human", "person", "instruction"), "user") | {
    "observation": "tool",
    "tool_response": "tool",
}


def renaming(names: Sequence[str], formats: Sequence[Sequence[str]]) -> str | None:
    """Advice on which keys to rename, for one of the formats, given by their required keys; None without a guess."""
    lower = {name.strip().lower(): name for name in names}
    if "chosen" in lower and "rejected" in lower and not any("chosen" in keys for keys in formats):
        return f"these are preferences; rename {lower['chosen']!r} to 'completion' to train on the chosen answers alone"
    first = {keys[0] for keys in formats}
    guesses = [guess for keys in formats if (guess := _renamed(lower, keys, first - {*keys}))]
    if not guesses:
        return None
    fewest = min(guesses, key=len)
    return f"rename {' and '.join(f'{name!r:.80} to {key!r}' for name, key in fewest.items())}"


def _renamed(lower: dict[str, str], keys: Sequence[str], names: Collection[str]) -> dict[str, str]:
    """New names of keys, by the old ones, with which all of `keys` are there; empty if that cannot be guessed.

    lower: names by their lower case; names: keys that mean something else.
    """
    result: dict[str, str] = {}
    for key in keys:
        candidates = {name for name in lower if lower[name] not in result and name not in names} - ({*keys} - {key})
        name = next((name for name in (key, *_OTHER_KEYS.get(key, ())) if name in candidates), None)
        if name is None:
            return {}
        result[lower[name]] = key
    return {name: key for name, key in result.items() if name != key}
