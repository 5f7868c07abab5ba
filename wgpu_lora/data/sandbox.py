"""The sandbox for chat templates: jinja2's immutable sandbox, with a limit on computation.

jinja2's own sandbox protects the machine from a template, but does not limit its time and memory. Here a template may
only use the features of published ones; its size is limited before it is compiled; and every operation is charged to a
budget before it runs (data/sandbox_costs.py, data/sandbox_filters.py), partly by calls inserted into its syntax tree
(data/sandbox_tree.py). So the limit does not depend on a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.lexer import Token, TokenStream
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from wgpu_lora.data import sandbox_costs as costs
from wgpu_lora.data.sandbox_costs import CALL, TURN, TooMuchError, charge
from wgpu_lora.data.sandbox_filters import charge_filter, charge_method
from wgpu_lora.data.sandbox_tree import HOOKS, MAX_NODES, Counting, size

__all__ = ["Sandbox", "TooMuchError", "budget"]

MAX_SOURCE = 1 << 17  # characters of a template; the longest published ones have about 20,000
MAX_TOKENS = 1 << 14
MAX_WORK = 1 << 20  # units of any template
WORK_PER_INPUT = 128  # plus this for each character of the conversation,
MOST_WORK = 1 << 27  # up to this: about half a minute, or half a gigabyte of text
MAX_NAME = 256  # characters of a name, since names may be part of the output


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FILTERS = _names(
    "abs capitalize count d default dictsort e escape first float forceescape format groupby indent int items join "
    "last length list lower map max min reject rejectattr replace reverse round safe select selectattr sort string "
    "sum title tojson trim unique upper"
)
TESTS = _names(  # these do not look at items
    "boolean defined divisibleby even false float integer iterable mapping none number odd sameas sequence string true "
    "undefined"
)
ARITHMETIC = _names("test_divisibleby test_even test_odd")  # must not get text, which `%` would format
COMPARISONS = _names("!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lower lt ne upper")
METHODS: dict[type, frozenset[str]] = {
    str: _names(
        "capitalize count endswith find format index isalnum isalpha isdigit islower isspace isupper join lower "
        "lstrip removeprefix removesuffix replace rsplit rstrip split splitlines startswith strip title upper"
    ),
    list: _names("count index"),
    tuple: _names("count index"),
    dict: _names("get items keys values"),
    int: frozenset(),
    float: frozenset(),
    type: frozenset(),
}
GLOBALS = ("dict", "joiner", "cycler")


@contextmanager
def budget(characters: int) -> Iterator[None]:
    """Limit the computation of templates in the block; `characters`: size of the conversation."""
    with costs.bounded(min(MAX_WORK + WORK_PER_INPUT * characters, MOST_WORK)):
        yield


class _Bounded(jinja2.ext.Extension):
    """Limits the tokens of a template while it is parsed."""

    def filter_stream(self, stream: TokenStream) -> Iterable[Token]:
        for count, token in enumerate(stream):
            if count >= MAX_TOKENS:
                raise TooMuchError(f"it has more than {MAX_TOKENS:,} words")
            if token.type == "name" and len(token.value) > MAX_NAME:
                raise TooMuchError(f"it has a name of more than {MAX_NAME} characters")
            yield token


class _Namespace(Namespace):
    def __repr__(self) -> str:
        return "<Namespace>"  # jinja2's own would print all contents without being charged


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox with charged operations; see `budget`."""

    intercepted_binops = frozenset(["+", "-", "*", "**", "%", "/", "//"])

    def __init__(self, extensions: Iterable[type[jinja2.ext.Extension]] = (), **options: Any) -> None:
        # The optimizer would compute constants at compile time, without a budget.
        super().__init__(optimized=False, extensions=[_Bounded, *extensions], **options)
        self.filters = {name: _charged(name, self.filters[name]) for name in FILTERS}
        self.tests = {name: _charged(name, self.tests[name]) for name in COMPARISONS} | {
            name: _called(self.tests[name]) for name in TESTS
        }
        self.filters |= HOOKS
        self.globals = {name: self.globals[name] for name in GLOBALS} | {"range": _range, "namespace": _Namespace}

    def add_filter(self, name: str, filter: Callable[..., Any]) -> None:
        """Add a filter, which is charged like the others."""
        self.filters[name] = _charged(name, filter)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise TooMuchError(f"it has more than {MAX_SOURCE:,} characters")
        tree = super()._parse(source, name, filename)
        if size(tree) > MAX_NODES:
            raise TooMuchError(f"it has more than {MAX_NODES:,} parts")
        return Counting().visit(tree)

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name in HOOKS:
            raise TooMuchError("it names an internal filter")
        return super().call_filter(name, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        allowed = next((names for type_, names in METHODS.items() if isinstance(obj, type_)), None)
        if allowed is not None and attr not in allowed:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        charge(TURN)
        costs.charge_items(argument)  # for hashing it
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        costs.charge_operator(operator, left, right)
        return costs.result(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        charge(CALL + len(args) + len(kwargs))
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        named = [value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")]  # jinja2's own
        if isinstance(owner, tuple(METHODS)):
            if not __self.is_safe_attribute(owner, name, method):
                raise TooMuchError(f"it calls {name}, which is not supported")
            args = tuple(map(costs.listed, args))
            charge_method(owner, name, [*args, *named])
        elif not isinstance(__obj, Macro | LoopContext):  # these only pass on their arguments
            args = tuple(map(costs.listed, args))
            costs.charge_items([*args, *named] if __obj is not _Namespace else args)
            if __obj in (dict, _Namespace):
                costs.check_pairs(args)
        return costs.result(super().call(__context, __obj, *args, **kwargs))


def _range(*args: int) -> list[int]:
    """`range` as a list, so that looking through it is charged."""
    if any(abs(arg) > MAX_RANGE for arg in args):
        raise TooMuchError("it calls range with too large a number")
    numbers = range(*args)
    charge(TURN * len(numbers))
    return list(numbers)


def _called(test: Any) -> Callable[..., Any]:
    """Charge a test for each call."""
    name = test.__name__

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> Any:
        charge(CALL)
        if name in ARITHMETIC:
            costs.check_numbers(*args, *kwargs.values())
        return test(*args, **kwargs)

    return run


def _charged(name: str, function: Any) -> Callable[..., Any]:
    """Charge a filter or a test for its arguments."""
    passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # the first argument is a context or an environment

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        args = (*args[:passed], *map(costs.listed, args[passed:]))
        kwargs = {key: costs.listed(value) for key, value in kwargs.items()}
        environment = getattr(args[0], "environment", args[0]) if passed else None
        charge_filter(name, args[passed:], kwargs, environment)
        return costs.result(function(*args, **kwargs))

    return run
