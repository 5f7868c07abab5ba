"""The costs of a chat template's methods and filters (data/sandbox_costs.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jinja2
from jinja2.filters import make_multi_attrgetter
from markupsafe import Markup

from wgpu_lora.data.sandbox_costs import (
    CALL,
    TURN,
    TooMuchError,
    charge,
    charge_escaped,
    charge_format,
    charge_items,
    charge_key,
    charge_text,
    check_numbers,
    extent,
)  # fmt: skip

MAX_INDENT = 16
MAX_PRECISION = 15
MAX_PATH = 8  # names in `a.b.c`


def charge_method(value: Any, name: str, given: list[Any]) -> None:
    """Charge for a method of a text, a list or a dict; `given`: its arguments."""
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
        if name == "rsplit":  # Python's backward search takes quadratic time
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
    charge(len(str(s).splitlines()) * MAX_INDENT)  # splitlines knows more line ends than "\n"


def _tojson(value: Any, ensure_ascii: Any = False, indent: Any = 0, separators: Any = None, sort_keys: Any = 0) -> None:
    _at_most("tojson", indent or 0, MAX_INDENT)
    if any(len(str(part)) > MAX_INDENT for part in separators or ()):
        raise TooMuchError("it calls tojson with too long a separator")
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
        raise TooMuchError(f"it calls {name} with too large a number")


# Costs of filters in addition to looking through their arguments; the parameters have jinja2's names.
COSTS: dict[str, Callable[..., None]] = {
    "replace": _replace, "join": _join, "trim": _trim, "indent": _indent, "tojson": _tojson, "round": _round,
    "sum": _sum, "sort": _sorted, "dictsort": _sorted, "groupby": _sorted, "unique": _unique, "min": _sorted,
    "max": _sorted, "list": _spread, "title": _title, "format": _formatted, "escape": _escaped, "e": _escaped,
    "forceescape": _escaped, **dict.fromkeys(("string", "safe", "lower", "upper", "capitalize"), charge_text),
}  # fmt: skip
_AT_ONCE = ("length", "count", "first", "last", "default", "d", "items")  # these do not look at items
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
_LED_TO = ("join", "sum", "groupby", "unique", "min", "max", "sort")  # these look up the whole path for every item


def charge_filter(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], environment: Any = None) -> None:
    """Charge for a filter; `args`: its value and positional arguments."""
    charge(CALL)
    place = _PATHS.get(name, len(args))
    path = args[place] if place < len(args) else kwargs.get("attribute")
    if isinstance(path, str) and path.count(".") + path.count(",") >= MAX_PATH:
        raise TooMuchError(f"it calls {name} with too long a path")
    if name in _AT_ONCE and not isinstance(args[0] if args else None, str):
        return
    given = [*args, *kwargs.values()]
    charge_items(given)
    if path is not None and name in _LED_TO and args:
        # The path may lead into an object that is not charged otherwise, such as a namespace.
        args = (_led_to(environment, path, args[0], kwargs.get("default")), *args[1:])
        charge_items(args[0])
    charge_escaped(*args, *kwargs.values())
    if name in COSTS:
        COSTS[name](*args, **kwargs)  # with the filter's own parameter names


def _led_to(environment: Any, path: Any, values: Any, default: Any) -> list[Any]:
    charge(TURN * MAX_PATH * extent(values))
    look = make_multi_attrgetter(environment, path)
    found = [look(value) for value in values]
    one = [value[0] if len(value) == 1 else value for value in found]
    return [default if isinstance(value, jinja2.Undefined) else value for value in one]
