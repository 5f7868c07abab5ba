"""What a chat template's operations cost, charged to one budget before they are carried out (data/sandbox.py).

One unit is about what jinja2 does in a quarter of a microsecond, or a character or a few that are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jinja2
from markupsafe import Markup

from wgpu_lora.data.format_costs import FormatError, conversions_of, fields_of

TURN = 16  # an item of a list, one turn of a loop
CALL = 32
OPERATOR = 8
CHARACTERS = 4  # that are looked through for one unit
MAX_BITS = 128  # of a whole number
MAX_KEY = 1 << 60  # of a whole number as a key: of greater ones any number may have the same hash
ESCAPED = 5  # how much longer a text may get by escaping

_left: ContextVar[list[int] | None] = ContextVar("chat_template_work", default=None)


class TooMuchError(jinja2.TemplateError):
    """A template wants to compute more than a conversation needs."""


@contextmanager
def bounded(work: int) -> Iterator[None]:
    """Bounds what is charged inside."""
    token = _left.set([work])
    try:
        yield
    finally:
        _left.reset(token)


def charge(work: int) -> None:
    """Takes from the budget; TooMuchError when it is used up."""
    if work < 0:
        raise ValueError("nothing costs less than nothing")
    left = _left.get()
    if left is not None:
        left[0] -= work
        if left[0] < 0:
            raise TooMuchError("it computes too much for one conversation")


def charge_items(value: Any, characters: int = CHARACTERS, indent: int = 0, times: int = 1) -> None:
    """Charges `times` for all that a value holds; `indent`: what each level of it is indented by."""
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
    """Charges for a value that is written out."""
    charge_items(value, 1, indent, times)


def charge_escaped(*values: Any) -> None:
    """What is combined with a text that is marked as safe gets escaped."""
    if any(isinstance(value, Markup) for value in values):
        charge_text(values, times=ESCAPED)


def charge_key(value: Any) -> None:
    """Charges for what is hashed, and refuses what can be made to collide: only the hash of a text is keyed."""
    charge_items(value)
    parts = value if isinstance(value, tuple) else (value,)
    for part in parts:
        number = isinstance(part, int | float) and (abs(part) > MAX_KEY or isinstance(value, tuple))
        if number or isinstance(part, tuple):
            raise TooMuchError("it looks up by numbers that are too large, or by several")


def check_pairs(values: Iterable[Any]) -> None:
    """Of what a dict is made of, where it is not made of dicts."""
    for value in values:
        for pair in [] if isinstance(value, dict) else value:
            if not isinstance(pair, str | list | tuple | dict):
                raise TooMuchError("it makes a dict of what are no pairs")
            charge(TURN)
            charge_key(next(iter(pair), None))


def check_numbers(*values: Any) -> None:
    if not all(isinstance(value, int | float) for value in values):
        raise TooMuchError("it computes with what are no numbers")


def extent(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict | set) else 0


def check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TooMuchError("it computes with numbers that are too large")


def charge_operator(operator: str, left: Any, right: Any) -> None:
    """Charges for `left operator right`."""
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
    """A format may ask for a width, and for a value any number of times; `conversions`: it is one for `%`."""
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
    """A result, charged for: at once, or as its items come."""
    if isinstance(value, Iterator):
        return _each(value)
    if isinstance(value, type({}.keys()) | type({}.values()) | type({}.items())):
        value = list(value)  # as a list, what looks through it is charged
    if isinstance(value, int):
        check_bits(value.bit_length())
    charge(1 + extent(value) * (TURN if isinstance(value, list | dict) else 1))
    return value


def listed(value: Any) -> Any:
    """What is made item by item, made: so that it can be charged for before it is used."""
    return list(value) if isinstance(value, Iterator) else value


def _each(values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
        charge(TURN)
        yield value
