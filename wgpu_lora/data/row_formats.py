"""Formats of rows, declared by their columns, and the choice between them by a row's keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

from wgpu_lora.data.unread_columns import is_empty, is_harmless, refusal
from wgpu_lora.errors import UserError
from wgpu_lora.names.text import join_words

T = TypeVar("T")
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
    refused: columns that change what such a row means, which the format does not read: name -> what to do about it.
    """

    required: Mapping[str, ColumnType]
    convert: Callable[[Fields], T]
    optional: Mapping[str, ColumnType] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


class Fields:
    """The fields of a row in one format. They are checked when they are read.

    columns: the row itself. unread: names of columns that have a value and that nothing has read yet.
    formats: those that errors give advice about; by default, they give none.
    """

    def __init__(self, columns: Row, form: RowFormat[Any], formats: RowFormats[Any] | None = None):
        self.columns, self._form, self._formats = columns, form, formats
        self.unread = {name for name, value in columns.items() if not is_empty(value)}

    def advice(self) -> str | None:
        """How to name the row's columns, so that another format reads all of them; None without a guess."""
        formats = self._formats
        if formats is None:
            return None
        return renaming(self.columns, formats.formats, lambda row: {*row} != {*self.columns} and formats.reads(row))

    def keep(self, but: Callable[[str], bool] = lambda name: False) -> dict[str, Any]:
        """All columns, which are kept as they are, so that they are used; but: whether one is not used by that."""
        self.unread = {name for name in self.unread if but(name)}
        return dict(self.columns)

    def __getitem__(self, name: str) -> Any:
        """The checked value; None for an optional field that is missing or null. Raises UserError."""
        value = self.columns.get(name)
        self.unread.discard(name)
        kind = self._form.required.get(name) or self._form.optional[name]
        if value is None and name not in self._form.required:
            return None
        try:
            return kind.check(value, name)
        except UserError as error:
            of_objects = isinstance(value, list) and value and isinstance(value[0], dict)
            advice = self._formats.advice(self.columns) if self._formats and kind.is_text and not of_objects else None
            if not advice:
                raise
            raise UserError(f"{str(error).removesuffix('.')}; {advice}.") from error


@dataclass(frozen=True)
class RowFormats(Generic[T]):
    """The formats of rows that are accepted. A row that fits several is read in the first whose keys are not null.

    other_objectives: other formats and how to choose them, for advice about rows that fit none of these.
    """

    formats: tuple[RowFormat[T], ...]
    other_objectives: Callable[[], Sequence[tuple[RowFormats[Any], str]]] = field(default=lambda: ())

    @cached_property
    def columns(self) -> dict[str, ColumnType]:
        """All columns that the formats use."""
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
        """Convert a row. Raises UserError as `read_with_notes`."""
        return self.read_with_notes(row)[0]

    def read_with_notes(self, row: Row) -> tuple[T, list[str]]:
        """Convert a row; returns what it is, and notes about columns that are not used.

        Raises:
            UserError: the row fits no format, a field is wrong, or a column that is not read would change what is
                trained on. The message names the field, not the position.
        """
        form = self._of(row)
        if form is None:
            keys = ", ".join(repr(key[:80]) for key in list(row)[:12]) or "none"
            text = f"the row fits no format: its keys are {keys}, but {self._requirements}"
            advice = self.advice(row)
            raise UserError(f"{text}{f'; {advice}' if advice else ''}.")
        try:
            result, unread = self._converted(row, form, Fields(row, form, self))
        except UserError as error:
            advice = self.shape_advice(row)
            if not advice or advice in str(error):
                raise
            raise UserError(f"{str(error).removesuffix('.')}; {advice}.") from error
        return result, [self._unused(name) for name in unread if not is_harmless(name, row[name])]

    def _converted(self, row: Row, form: RowFormat[T], fields: Fields) -> tuple[T, list[str]]:
        """What a row is, and the columns that nothing reads. Raises UserError."""
        result = form.convert(fields)
        unread = [name for name in row if name in fields.unread]
        for name in unread:
            if wrong := form.refused.get(name) or refusal(name, row[name]):
                raise UserError(f"{wrong}.")
        return result, unread

    def _unused(self, name: str) -> str:
        """A note about a column that is not used, with what would use it."""
        users = [f"rows of {join_words([*form.required])} use it" for form in self.formats
                 if name in {*form.required, *form.optional}]  # fmt: skip
        users += [f"{how} uses it" for formats, how in self.other_objectives() if name in formats.columns]
        return f"the column '{name:.80}' is not used" + (f" ({users[0]})" if users else "")

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

    def check_columns(self, names: Sequence[str]) -> None:
        """Raise UserError unless these columns of a table fit a format; the message lists them."""
        if self.matches(names):
            return
        columns = ", ".join(repr(name[:80]) for name in names[:20]) or "none"
        advice = self._other_names(dict.fromkeys(names, ""), lambda row: not self._leftover(row)) or "rename them"
        raise UserError(f"the columns are {columns}, but {self._requirements}; {advice}.")

    def advice(self, row: Row) -> str | None:
        """How to turn a row, or an object that contains rows, into one that can be read; None if there is no guess.

        What is advised has been tried on the row: the result can be read, and no text of it is left out.
        """
        present = {key: value for key, value in row.items() if value is not None}
        return next(filter(None, (self._other_names(names, self.reads) for names in (present, row))), None) or (
            self.shape_advice(row)
        )

    def reads(self, row: Row) -> bool:
        """Whether a row can be read without leaving out a text, or anything else that is not mere bookkeeping."""
        form = self._of(row)
        if form is None:
            return False
        try:
            self._converted(row, form, Fields(row, form))
        except UserError:
            return False
        return not self._leftover(row)

    def _leftover(self, row: Row) -> list[str]:
        form = self._of(row)
        used = {*form.required, *form.optional} if form else set()
        return [name for name, value in row.items() if name not in used and not is_harmless(name) and value is not None
                and isinstance(value, str | list | dict)]  # fmt: skip

    def shape_advice(self, row: Row) -> str | None:
        """Advice for an object that contains rows instead of being one; None if it does not."""
        for name, value in row.items():
            items = value if isinstance(value, list) else []
            alone = not any(
                isinstance(row[other], str | list | dict) and not is_harmless(other) for other in {*row} - {name}
            )
            if items and alone and all(isinstance(item, dict) and self.reads(item) for item in items[:8]):
                return f"its rows seem to be the list {name[:80]!r}: write only that list to the file"
        texts = [value for name, value in row.items() if name in self.columns and self.columns[name].is_text]
        if texts and all(isinstance(value, list) and value and isinstance(value[0], str) for value in texts):
            return "it has columns, not rows: write a list of objects, one for each row"
        if texts and all(isinstance(value, dict) and value and all(map(str.isdigit, value)) for value in texts):
            return "it has columns, not rows: write it with pandas' to_json(..., orient='records', lines=True)"
        return None

    def _other_names(self, row: Row, reads: Callable[[Row], bool]) -> str | None:
        """Advice on other keys or another objective; reads: whether a row can be read as it would then be."""
        if self.matches([*row]):
            return None
        objectives = [
            how
            for formats, how in self.other_objectives()
            if formats.matches([*row]) and (formats.reads(row) if any(row.values()) else not formats._leftover(row))
        ]
        if objectives:
            return f"use {' or '.join(objectives)} for such rows"
        return renaming(row, self.formats, reads)

    @property
    def _requirements(self) -> str:
        columns = "; ".join(join_words([*form.required]) for form in self.formats)
        return f"the format needs {columns}" if len(self.formats) == 1 else f"the formats need {columns}"


# Other names of keys, the most common first; and of roles.
_QUESTION = ("instruction", "question", "query", "problem", "input", "user", "source", "prompt")
_ANSWER = ("completion", "output", "answer", "response", "solution", "reply", "target", "assistant")
_OTHER_KEYS = {
    "messages": ("conversations", "dialogue", "dialog", "chat"),
    "conversations": ("conversation",),
    "prompt": _QUESTION,
    "instruction": _QUESTION,
    "completion": _ANSWER,
    "output": _ANSWER,
    "input": ("context", "inputs"),
    "system": ("system_prompt", "system_message"),
}
OTHER_ROLES = dict.fromkeys(("gpt", "bot", "ai", "model", "chatgpt", "bing", "chatbot", "bard", "agent"), "assistant")
OTHER_ROLES |= dict.fromkeys(("human", "person", "instruction"), "user") | {
    "observation": "tool",
    "tool_response": "tool",
}


def renaming(row: Row, formats: Sequence[RowFormat[Any]], reads: Callable[[Row], bool]) -> str | None:
    """Advice on which keys to rename, for one of the formats; None without a guess that makes the row readable."""
    lower = {name.strip().lower(): name for name in row}
    if "chosen" in lower and "rejected" in lower and not any("chosen" in form.required for form in formats):
        chosen = {name: value for name, value in row.items() if name != lower["rejected"]}
        if reads(_with_names(chosen, {lower["chosen"]: "completion"})):
            return (
                f"these are preferences; rename {lower['chosen']!r} to 'completion' and remove {lower['rejected']!r} "
                "to train on the chosen answers alone"
            )
        return None
    first = {next(iter(form.required)) for form in formats}
    guesses = [guess for form in formats if (guess := _renamed(lower, form, first - {*form.required}))]
    for guess in sorted(guesses, key=len):
        if reads(_with_names(row, guess)):
            return f"rename {' and '.join(f'{name!r:.80} to {key!r}' for name, key in guess.items())}"
    return None


def _with_names(row: Row, names: Mapping[str, str]) -> Row:
    return {names.get(name, name): value for name, value in row.items()}


def _renamed(lower: dict[str, str], form: RowFormat[Any], names: Collection[str]) -> dict[str, str]:
    """New names of keys, by the old ones, with which a row has the format; empty if that cannot be guessed.

    lower: names by their lower case; names: keys that mean something else.
    """
    result: dict[str, str] = {}
    keys = {**form.required, **form.optional}
    for key in keys:
        candidates = {name for name in lower if lower[name] not in result and name not in names} - ({*keys} - {key})
        name = next((name for name in (key, *_OTHER_KEYS.get(key, ())) if name in candidates), None)
        if name is not None:
            result[lower[name]] = key
        elif key in form.required:
            return {}
    return {name: key for name, key in result.items() if name != key}
