"""What a chat template's operations cost, charged to one budget before they are carried out (data/sandbox.py).

One unit is about what jinja2 does in a quarter of a microsecond, or a character or a few that are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
MAX_INDENT = 16
MAX_PRECISION = 15
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
        for added, lookups in ((n, 0) for n in conversions_of(shown)) if conversions else fields_of(shown):
            charge(added + TURN * lookups)
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
        _strip(value, *given[:1])


def _replace(s: Any, old: Any, new: Any, count: Any = None) -> None:
    charge_text(s)
    charge(str(s).count(str(old)) * len(str(new)))


def _join(value: Any, d: Any = "", attribute: Any = None) -> None:
    charge_text(value)
    charge(extent(value) * len(str(d)))


def _strip(value: Any, chars: Any = None) -> None:
    charge(extent(value) * (1 + extent(chars) // 16))


def _indent(s: Any, width: Any = 4, first: Any = False, blank: Any = False) -> None:
    _at_most("indent", width, MAX_INDENT)
    charge_text(s)
    charge(4 * extent(s))
    charge(len(str(s).splitlines()) * MAX_INDENT)  # it goes by all that ends a line


def _tojson(value: Any, ensure_ascii: Any = False, indent: Any = 0, separators: Any = None, sort_keys: Any = 0) -> None:
    _at_most("tojson", indent or 0, MAX_INDENT)
    if any(len(str(part)) > MAX_INDENT for part in separators or ()):
        raise TooMuchError("it gives tojson too long a separator")
    charge_text(value, 2 * MAX_INDENT if separators else indent or 0)


def _round(value: Any, precision: Any = 0, method: Any = "common") -> None:
    _at_most("round", precision, MAX_PRECISION)


def _sum(iterable: Any, attribute: Any = None, start: Any = 0) -> None:
    parts = iterable if isinstance(iterable, list | tuple) else []
    if extent(start) or (attribute is None and any(map(extent, parts))):
        raise TooMuchError("it adds up what are no numbers")
    if attribute is not None:
        charge_items(parts, times=1 + len(parts) // 8)  # the attribute may be a list


def _sorted(value: Any, *args: Any, **kwargs: Any) -> None:
    charge_text(value, times=extent(value).bit_length())


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
    "replace": _replace, "join": _join, "trim": _strip, "indent": _indent, "tojson": _tojson, "round": _round,
    "sum": _sum, "sort": _sorted, "dictsort": _sorted, "groupby": _sorted, "unique": _sorted, "min": _sorted,
    "max": _sorted, "list": _spread, "title": _spread, "format": _formatted, "string": charge_text,
    "escape": _escaped, "e": _escaped, "forceescape": _escaped,
}  # fmt: skip
_AT_ONCE = ("length", "count", "first", "last", "default", "d", "items", "safe")  # these look at no item
_BY_PATH = ("map", "selectattr", "rejectattr", "groupby", "sort", "unique", "min", "max", "sum")


def charge_filter(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Charges for a filter; `args`: its value and what follows."""
    charge(CALL)
    paths = [kwargs.get("attribute"), *(args[1:2] if name in _BY_PATH else args[2:3] if name == "join" else ())]
    for path in paths:
        if isinstance(path, str) and path.count(".") + path.count(",") >= MAX_PATH:
            raise TooMuchError(f"it gives {name} too long a path")
    if name in _AT_ONCE and not isinstance(args[0] if args else None, str):
        return
    given = [*args, *kwargs.values()]
    charge_items(given)
    charge_escaped(*given)
    if name in COSTS:
        COSTS[name](*args, **kwargs)  # by name, as the filter itself takes them
