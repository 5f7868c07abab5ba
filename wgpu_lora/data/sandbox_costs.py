"""What a chat template's operations cost, charged to one budget before they are carried out (data/sandbox.py).

One unit is about what jinja2 does in a quarter of a microsecond, or a character or a few that are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2.filters import make_multi_attrgetter
from markupsafe import Markup

from wgpu_lora.data.format_costs import FormatError, conversions_of, fields_of

TURN = 16  # an item of a list, one turn of a loop
CALL = 32
OPERATOR = 8
CHARACTERS = 4  # that are looked through for one unit
MAX_BITS = 128  # of a whole number
MAX_INDENT = 16
MAX_PRECISION = 15
MAX_KEY = 1 << 60  # of a whole number as a key: of greater ones any number may have the same hash
MAX_PATH = 8  # names in `a.b.c`
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


def charge_method(value: Any, name: str, given: list[Any]) -> None:
    """Charges for a method of a text, a list or a dict; `given`: its arguments, which are all by position but where
    they make no difference.
    """
    if isinstance(value, dict):
        charge_items(given)
        return
    charge_items([value, *given])
    charge_escaped(value, *given)
    if name == "format":
        charge_format(value, given, conversions=False)
    elif name == "join":
        _join(value=given[0] if given else (), d=value)
    elif name == "replace" and len(given) > 1:
        _replace(value, given[0], given[1])
    elif name in ("split", "rsplit", "splitlines", "title"):
        charge(4 * extent(value))
        if name == "rsplit":  # Python searches backwards in quadratic time
            charge(extent(value) * max(map(extent, given), default=0) // 8)
    elif name.endswith("strip"):
        _trim(value, *given[:1])


def _replace(s: Any, old: Any, new: Any, count: Any = None) -> None:
    charge_text(s)
    charge(str(s).count(str(old)) * len(str(new)))


def _join(value: Any, d: Any = "", attribute: Any = None) -> None:
    charge_text(value)
    charge(extent(value) * len(str(d)))


def _trim(value: Any, chars: Any = None) -> None:
    charge_text(value)
    charge(len(str(value)) * (1 + extent(chars) // 16))


def _indent(s: Any, width: Any = 4, first: Any = False, blank: Any = False) -> None:
    _at_most("indent", width, MAX_INDENT)
    charge_text(s, times=5)
    charge(len(str(s).splitlines()) * MAX_INDENT)  # it goes by all that ends a line


def _tojson(value: Any, ensure_ascii: Any = False, indent: Any = 0, separators: Any = None, sort_keys: Any = 0) -> None:
    _at_most("tojson", indent or 0, MAX_INDENT)
    if any(len(str(part)) > MAX_INDENT for part in separators or ()):
        raise TooMuchError("it gives tojson too long a separator")
    charge_text(value, 2 * MAX_INDENT if separators else max(0, indent or 0))


def _round(value: Any, precision: Any = 0, method: Any = "common") -> None:
    check_numbers(value)
    _at_most("round", precision, MAX_PRECISION)


def _sum(iterable: Any, attribute: Any = None, start: Any = 0) -> None:
    check_numbers(start, *iterable)


def _sorted(value: Any, *args: Any, **kwargs: Any) -> None:
    charge_text(value, times=extent(value).bit_length())


def _unique(value: Any, *args: Any, **kwargs: Any) -> None:
    _sorted(value)
    for item in value:
        charge_key(item)


def _title(value: Any) -> None:
    charge_text(value)
    charge(16 * len(str(value)))


def _spread(value: Any) -> None:
    charge(4 * extent(value))


def _formatted(value: Any, *args: Any, **kwargs: Any) -> None:
    charge_format(str(value), [*args, *kwargs.values()], conversions=True)


def _escaped(value: Any) -> None:
    charge_escaped(Markup(), value)


def _at_most(name: str, number: Any, most: int) -> None:
    if not isinstance(number, int) or abs(number) > most:
        raise TooMuchError(f"it gives {name} too large a number")


# What filters cost beyond looking at all that they are given; the parameters have jinja2's names.
COSTS: dict[str, Callable[..., None]] = {
    "replace": _replace, "join": _join, "trim": _trim, "indent": _indent, "tojson": _tojson, "round": _round,
    "sum": _sum, "sort": _sorted, "dictsort": _sorted, "groupby": _sorted, "unique": _unique, "min": _sorted,
    "max": _sorted, "list": _spread, "title": _title, "safe": charge_text, "format": _formatted, "string": charge_text,
    "escape": _escaped, "e": _escaped, "forceescape": _escaped,
}  # fmt: skip
_AT_ONCE = ("length", "count", "first", "last", "default", "d", "items")  # these look at no item
_PATHS = {
    "join": 2,
    "sum": 1,
    "groupby": 1,
    "unique": 2,
    "min": 2,
    "max": 2,
    "sort": 3,
    "selectattr": 1,
    "rejectattr": 1,
}
_LED_TO = ("join", "sum", "groupby", "unique", "min", "max", "sort")  # these take what a path leads to at once


def charge_filter(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], environment: Any = None) -> None:
    """Charges for a filter; `args`: its value and what follows."""
    charge(CALL)
    place = _PATHS.get(name, len(args))
    path = args[place] if place < len(args) else kwargs.get("attribute")
    if isinstance(path, str) and path.count(".") + path.count(",") >= MAX_PATH:
        raise TooMuchError(f"it gives {name} too long a path")
    if name in _AT_ONCE and not isinstance(args[0] if args else None, str):
        return
    given = [*args, *kwargs.values()]
    charge_items(given)
    if path is not None and name in _LED_TO and args:
        # What it leads to may lie in what nobody looks into, such as a namespace.
        args = (_led_to(environment, path, args[0], kwargs.get("default")), *args[1:])
        charge_items(args[0])
    charge_escaped(*args, *kwargs.values())
    if name in COSTS:
        COSTS[name](*args, **kwargs)  # by name, as the filter itself takes them


def _led_to(environment: Any, path: Any, values: Any, default: Any) -> list[Any]:
    charge(TURN * MAX_PATH * extent(values))
    look = make_multi_attrgetter(environment, path)
    found = [look(value) for value in values]
    one = [value[0] if len(value) == 1 else value for value in found]
    return [default if isinstance(value, jinja2.Undefined) else value for value in one]
