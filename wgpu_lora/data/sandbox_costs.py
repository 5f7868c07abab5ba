"""The costs of a chat template's operations, charged to a budget before they run (data/sandbox.py).

One unit is about a quarter of a microsecond of jinja2, or a few characters of memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jinja2
from markupsafe import Markup

from wgpu_lora.data.format_costs import FormatError, conversions_of, fields_of

TURN = 16  # an item of a list, an iteration of a loop
CALL = 32
OPERATOR = 8
CHARACTERS = 4  # looked through for one unit
MAX_BITS = 128  # of an integer
MAX_KEY = 1 << 60  # of an integer as a key, since hashes of larger ones can collide
ESCAPED = 5  # largest growth of a text by escaping

_left: ContextVar[list[int] | None] = ContextVar("chat_template_work", default=None)


class TooMuchError(jinja2.TemplateError):
    """A template exceeds its computation limit or uses an unsupported feature."""


@contextmanager
def bounded(work: int) -> Iterator[None]:
    """Set the budget for charges in the block."""
    token = _left.set([work])
    try:
        yield
    finally:
        _left.reset(token)


def charge(work: int) -> None:
    """Charge the budget; TooMuchError if it is exhausted."""
    if work < 0:
        raise ValueError("work must not be negative")
    left = _left.get()
    if left is not None:
        left[0] -= work
        if left[0] < 0:
            raise TooMuchError("it does too much work for this conversation")


def charge_items(value: Any, characters: int = CHARACTERS, indent: int = 0, times: int = 1) -> None:
    """Charge `times` for all contents of a value; `indent`: indentation of each level."""
    stack = [(value, 0)]
    while stack:
        item, margin = stack.pop()
        work = 1 + margin
        if isinstance(item, str):
            work += len(item) // characters
        elif isinstance(item, int):
            work += item.bit_length() // 3
        elif isinstance(item, dict | list | tuple | set):
            work += TURN * len(item)
        charge(times * work)
        if isinstance(item, dict):
            stack += [(part, margin + indent) for pair in item.items() for part in pair]
        elif isinstance(item, list | tuple | set):
            stack += [(part, margin + indent) for part in item]


def charge_text(value: Any, indent: int = 0, times: int = 1) -> None:
    """Charge for converting a value to text."""
    charge_items(value, 1, indent, times)


def charge_escaped(*values: Any) -> None:
    """Charge for escaping, which happens if one of the values is marked as safe."""
    if any(isinstance(value, Markup) for value in values):
        charge_text(values, times=ESCAPED)


def charge_key(value: Any) -> None:
    """Charge for hashing, and refuse keys that can be made to collide: only hashes of texts are keyed."""
    charge_items(value)
    parts = value if isinstance(value, tuple) else (value,)
    for part in parts:
        number = isinstance(part, int | float) and (abs(part) > MAX_KEY or isinstance(value, tuple))
        if number or isinstance(part, tuple):
            raise TooMuchError("it uses too large a number, or several, as a key")


def check_pairs(values: Iterable[Any]) -> None:
    """Check and charge the pairs that a dict is made of, unless it is made of dicts."""
    for value in values:
        for pair in [] if isinstance(value, dict) else value:
            if not isinstance(pair, str | list | tuple | dict):
                raise TooMuchError("it makes a dict of items that are not pairs")
            charge(TURN)
            charge_key(next(iter(pair), None))


def check_numbers(*values: Any) -> None:
    if not all(isinstance(value, int | float) for value in values):
        raise TooMuchError("it computes with values that are not numbers")


def extent(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict | set) else 0


def check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TooMuchError("it computes with numbers that are too large")


def charge_operator(operator: str, left: Any, right: Any) -> None:
    """Charge for `left operator right`."""
    charge(OPERATOR)
    charge_escaped(left, right)
    if operator == "*":
        for value, count in ((left, right), (right, left)):
            charge(extent(value) * max(0, count) if isinstance(count, int) else 0)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() * right)
    elif operator == "%" and isinstance(left, str):
        charge_format(left, list(right) if isinstance(right, tuple) else [right], conversions=True)
    elif operator == "+":
        charge(extent(left) + extent(right))


def charge_format(text: str, values: list[Any], conversions: bool) -> None:
    """Charge for formatting, with its widths and repeated values; `conversions`: for `%`, else for `str.format`."""
    shown = str(text)
    charge(2 * len(shown))
    fields = 0
    try:
        for added in conversions_of(shown) if conversions else fields_of(shown):
            charge(added)
            fields += 1
    except FormatError as error:
        raise TooMuchError(str(error)) from None
    charge_text(values, times=1 + fields)


def result(value: Any) -> Any:
    """Charge for a result, for iterators as their items are produced."""
    if isinstance(value, Iterator):
        return _each(value)
    if isinstance(value, type({}.keys()) | type({}.values()) | type({}.items())):
        value = list(value)  # looking through a list is charged
    if isinstance(value, int):
        check_bits(value.bit_length())
    charge(1 + extent(value) * (TURN if isinstance(value, list | dict) else 1))
    return value


def listed(value: Any) -> Any:
    """Convert iterators to lists, so that they can be charged before they are used."""
    return list(value) if isinstance(value, Iterator) else value


def _each(values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
        charge(TURN)
        yield value
