"""Where chat templates run: jinja2's immutable sandbox, with a bound on how much a rendering may compute.

jinja2's own sandbox keeps a template from the machine, but not from running for ever or from filling the memory. Here
every turn of a loop, every call and all that an operation goes over is charged to one budget, and what could make a
value much larger than those it is made of is charged before it does. So the bound does not depend on a clock.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SOURCE = 1 << 20  # characters of a template
MAX_WORK = 1 << 21  # items and characters gone over, beyond what the conversation itself comes to
WORK_PER_INPUT = 64  # for each character of the conversation
TURN = 16  # what one turn of a loop or a call counts for, at the least
MACRO = 256
MAX_BITS = 4096  # of a whole number
MAX_INDENT = 16
MAX_COUNT = 100_000  # of a number that is given to a filter or a text's method: a width, a count
# No published template uses these, and what they write has little to do with what they are given.
LEFT_OUT = ("batch", "slice", "urlize", "wordwrap", "pprint", "xmlattr", "random")
AT_ONCE = ("length", "count", "first", "last", "default", "d", "attr", "items")  # filters that look at no item

_SPEC = re.compile(r"%[^A-Za-z%]*|\{[^}]*")  # of a format: what may hold a width
_DIGITS = re.compile(r"[0-9]+")

_left: ContextVar[list[int] | None] = ContextVar("chat_template_work", default=None)


class TooMuchError(jinja2.TemplateError):
    """A template wants to compute more than a conversation needs."""


@contextmanager
def budget(characters: int) -> Iterator[None]:
    """Bounds what templates compute inside; `characters`: of the conversation that is rendered."""
    token = _left.set([MAX_WORK + WORK_PER_INPUT * characters])
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


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox within a budget (`budget`)."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        # The optimizer would compute constants while it compiles, with no budget.
        super().__init__(optimized=False, **options)
        for name in LEFT_OUT:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters = {name: _charged(name, filter) for name, filter in self.filters.items()}
        self.tests = {name: _charged(name, test) for name, test in self.tests.items()}
        self.filters |= {f.__name__: f for f in (_turn, _macro, _out, _seen, _copied, _concat, _tuple)}

    def add_filter(self, name: str, filter: Callable[..., Any]) -> None:
        """A further filter, charged as the others are."""
        self.filters[name] = _charged(name, filter)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise TooMuchError(f"it has more than {MAX_SOURCE:,} characters")
        return _Counting().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for value, count in ((left, right), (right, left)):
                charge(_extent(value) * max(0, count) if isinstance(count, int) else 0)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * right)
        elif operator == "%" and isinstance(left, str | bytes):
            _charge_format(left, list(right) if isinstance(right, tuple) else [right])
        elif operator == "+":
            charge(_extent(left) + _extent(right))
        return _within(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)  # str.format comes wrapped
        args = tuple(map(_listed, args))
        _charge_call(getattr(method, "__name__", ""), getattr(method, "__self__", None), args, kwargs)
        return _within(super().call(__context, __obj, *args, **kwargs))


class _Counting(NodeTransformer):
    """Has a template charge what is not an operation: turns, output, comparisons, `~` and tuples."""

    def _with_turn(self, node: Any, charge: str = "_turn") -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call(charge, nodes.Const(None))).set_lineno(node.lineno))
        return node

    visit_For = _with_turn

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_turn(node, "_macro")

    visit_CallBlock = visit_Macro

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        texts = [nodes.Const(n.data) if isinstance(n, nodes.TemplateData) else n for n in node.nodes]
        node.nodes = [_call("_out", text) for text in texts]
        return node.set_lineno(node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _call("_seen", node.expr)
        for operand in node.ops:
            operand.expr = _call("_seen", operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _call("_copied", node.node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("_concat", nodes.List(node.nodes))

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _call("_tuple", nodes.List(node.items)) if node.ctx == "load" else node


def _call(name: str, argument: nodes.Expr) -> nodes.Filter:
    """A call of one of the functions below: as a filter, because the sandbox looks into every other call."""
    return nodes.Filter(argument, name, [], [], None, None)


# They are given the context so that the compiler does not call them.
@jinja2.pass_context
def _turn(_: Any, __: None) -> None:
    charge(TURN)


@jinja2.pass_context
def _macro(_: Any, __: None) -> None:
    charge(MACRO)


@jinja2.pass_context
def _out(_: Any, value: Any) -> Any:
    _charge_text(value)
    return value


@jinja2.pass_context
def _seen(_: Any, value: Any) -> Any:
    _charge_items(value)
    return value


@jinja2.pass_context
def _copied(_: Any, value: Any) -> Any:
    charge(_extent(value))
    return value


@jinja2.pass_context
def _concat(_: Any, values: list[Any]) -> str:
    for value in values:
        _charge_text(value)
    return "".join(map(str, values))


@jinja2.pass_context
def _tuple(_: Any, values: list[Any]) -> tuple[Any, ...]:
    _charge_items(values)  # so that tuples of tuples cannot cost more to hash than they did to make
    return tuple(values)


def _charged(name: str, function: Any) -> Callable[..., Any]:
    """A filter or a test that is charged for what it goes over."""
    passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # a context or an environment comes first

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        args = tuple(map(_listed, args))
        _charge_call(name, args[passed] if len(args) > passed else None, args[passed + 1 :], kwargs)
        return _within(function(*args, **kwargs))

    return run


def _charge_call(name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Charges a filter, a test or a call for what it is given, and where it makes more of that, for the result."""
    charge(TURN)
    given = [*args, *kwargs.values()]
    if any(isinstance(item, int) and abs(item) > (MAX_INDENT if name == "tojson" else MAX_COUNT) for item in given):
        raise TooMuchError(f"it gives {name} too large a number")
    if name in AT_ONCE and not isinstance(value, str):
        return
    for item in (value, *given):
        _charge_items(item)
    if name == "replace" and len(given) > 1:
        charge(str(value).count(str(given[0])) * len(str(given[1])))
    elif name == "join":
        # The filter joins its value by its argument, the method its argument by its value.
        separator, items = (value, given[0]) if isinstance(value, str) and given else (str(given[:1]), value)
        for item in items if isinstance(items, list | tuple | dict | str) else ():
            _charge_text(item)
            charge(len(separator))
    elif name in ("format", "format_map"):
        _charge_format(str(value), given)
    elif name in ("indent", "expandtabs", "translate"):
        widest = max(item if isinstance(item, int) else 1 for item in [8, *given])
        charge(_extent(value) * max([widest, *(_extent(v) for d in given if isinstance(d, dict) for v in d.values())]))
    elif name == "sum" and any(_extent(item) for item in [*given, *(value if isinstance(value, list | tuple) else [])]):
        raise TooMuchError("it adds up what are no numbers")
    elif name in ("tojson", "string"):
        _charge_text(value)


def _listed(value: Any) -> Any:
    """What is made item by item, made: so that it can be charged for before it is used."""
    return list(value) if isinstance(value, Iterator) else value


def _within(value: Any) -> Any:
    """A result, charged for: at once, or as its items come."""
    if isinstance(value, Iterator):
        return _each(value)
    if isinstance(value, int):
        _check_bits(value.bit_length())
    charge(1 + _extent(value))
    return value


def _each(values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
        charge(TURN)
        yield value


def _extent(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict | set) else 0


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TooMuchError("it computes with numbers that are too large")


def _charge_items(value: Any, characters: int = 16) -> None:
    """Charges for all that a value holds, one for every item and for every so many characters."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str | bytes):
            charge(1 + len(item) // characters)
        elif isinstance(item, dict):
            charge(1 + TURN * len(item))
            stack += [*item, *item.values()]
        elif isinstance(item, list | tuple | set):
            charge(1 + TURN * len(item))
            stack += item


def _charge_text(value: Any) -> None:
    """Charges for a value that is written out."""
    _charge_items(value, characters=1)


def _charge_format(text: str | bytes, values: list[Any]) -> None:
    """A format may ask for a width, and for a value any number of times."""
    shown = str(text)
    digits = max((len(run) for spec in _SPEC.findall(shown) for run in _DIGITS.findall(spec)), default=0)
    whole = [item for item in values if isinstance(item, int)]
    if digits > 4 or any(abs(item) > MAX_COUNT for item in whole):
        raise TooMuchError("it formats with a width that is too large")
    fields = shown.count("{") + shown.count("%")
    for item in values:
        for _ in range(1 + fields):
            _charge_text(item)
    charge(fields * 10**digits)
