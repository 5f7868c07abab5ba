"""Where chat templates run: jinja2's immutable sandbox, with a bound on how much a template may compute.

jinja2's own sandbox keeps a template from the machine, but not from running for ever or from filling the memory. Here
a template may use what published ones are made of and no more; its size is bounded before it is compiled; and all that
it does is charged to one budget (data/sandbox_costs.py) beforehand. So the bound does not depend on a clock.
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
from jinja2.visitor import NodeTransformer

from wgpu_lora.data import sandbox_costs as costs
from wgpu_lora.data.sandbox_costs import CALL, TURN, TooMuchError, charge

__all__ = ["Sandbox", "TooMuchError", "budget"]

MAX_SOURCE = 1 << 17  # characters of a template; the longest published ones have some 20,000
MAX_TOKENS = 1 << 14
MAX_NODES = 3000  # of its syntax tree; published ones have up to 1,300
MAX_WORK = 1 << 20  # units, beyond what the conversation itself comes to
WORK_PER_INPUT = 128  # for each character of the conversation,
MOST_WORK = 1 << 27  # but never more than this: half a minute, and half a gigabyte if all of it were kept
MACRO = 256


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FILTERS = _names(
    "abs capitalize count d default dictsort e escape first float forceescape format groupby indent int items join "
    "last length list lower map max min reject rejectattr replace reverse round safe select selectattr sort string "
    "sum title tojson trim unique upper"
)
TESTS = _names(  # these look at no item
    "boolean defined divisibleby even false float integer iterable mapping none number odd sameas sequence string true "
    "undefined"
)
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
STATEMENTS = (
    nodes.Template, nodes.Output, nodes.For, nodes.If, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.With,
    nodes.Assign, nodes.AssignBlock, nodes.ExprStmt, nodes.Break, nodes.Continue,
)  # fmt: skip


@contextmanager
def budget(characters: int) -> Iterator[None]:
    """Bounds what templates compute inside; `characters`: of the conversation that is rendered."""
    with costs.bounded(min(MAX_WORK + WORK_PER_INPUT * characters, MOST_WORK)):
        yield


class _Bounded(jinja2.ext.Extension):
    """Counts tokens while they are read, so that a parse is no longer than they are."""

    def filter_stream(self, stream: TokenStream) -> Iterable[Token]:
        for count, token in enumerate(stream):
            if count >= MAX_TOKENS:
                raise TooMuchError(f"it has more than {MAX_TOKENS:,} words")
            yield token


class _Namespace(Namespace):
    def __repr__(self) -> str:
        return "<Namespace>"  # jinja2's own writes out all that it holds, which nobody has charged for


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox within a budget (`budget`)."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, extensions: Iterable[type[jinja2.ext.Extension]] = (), **options: Any) -> None:
        # The optimizer would compute constants while it compiles, with no budget.
        super().__init__(optimized=False, extensions=[_Bounded, *extensions], **options)
        self.filters = {name: _charged(name, self.filters[name]) for name in FILTERS}
        self.tests = {name: _charged(name, self.tests[name]) for name in COMPARISONS} | {
            name: _called(self.tests[name]) for name in TESTS
        }
        self.filters |= {f.__name__: f for f in (_turn, _out, _seen, _copied, _concat, _tuple)}
        self.globals = {name: self.globals[name] for name in GLOBALS} | {"range": _range, "namespace": _Namespace}

    def add_filter(self, name: str, filter: Callable[..., Any]) -> None:
        """A further filter, charged as the others are."""
        self.filters[name] = _charged(name, filter)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise TooMuchError(f"it has more than {MAX_SOURCE:,} characters")
        tree = super()._parse(source, name, filename)
        if _size(tree, MAX_NODES) > MAX_NODES:
            raise TooMuchError(f"it has more than {MAX_NODES:,} parts")
        return _Counting().visit(tree)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        allowed = next((names for type_, names in METHODS.items() if isinstance(obj, type_)), None)
        if allowed is not None and attr not in allowed:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        costs.charge_items(argument)  # it is hashed
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        costs.charge_operator(operator, left, right)
        return costs.result(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        charge(CALL)
        method = getattr(__obj, "__wrapped__", __obj)  # str.format comes wrapped
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        named = [value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")]  # jinja2's own
        if isinstance(owner, tuple(METHODS)):
            if not __self.is_safe_attribute(owner, name, method):
                raise TooMuchError(f"it calls {name}, which chat templates have no use for")
            args = tuple(map(costs.listed, args))
            costs.charge_method(owner, name, [*args, *named])
        elif not isinstance(__obj, Macro | LoopContext) and __obj is not _Namespace:  # these only hand on
            args = tuple(map(costs.listed, args))
            costs.charge_items([*args, *named])
        return costs.result(super().call(__context, __obj, *args, **kwargs))


def _size(node: nodes.Node, most: int) -> int:
    """How many nodes a tree has; `most`: where to leave off."""
    stack, count = [node], 0
    while stack and count <= most:
        count += 1
        stack += stack.pop().iter_child_nodes()
    return count


class _Counting(NodeTransformer):
    """Has a template charge what is not a call: turns, output, comparisons, `~`, tuples and dicts."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if isinstance(node, nodes.Stmt | nodes.Template) and not isinstance(node, STATEMENTS):
            raise TooMuchError(f"it has a statement ({type(node).__name__}) that chat templates have no use for")
        return super().generic_visit(node, *args, **kwargs)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        if isinstance(node.value, int):
            costs.check_bits(node.value.bit_length())
        return node

    def _with_turn(self, node: Any, work: int = TURN) -> nodes.Node:
        work += _size(node, MAX_NODES)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("_turn", nodes.Const(None), work)).set_lineno(node.lineno))
        if getattr(node, "test", None) is not None:
            node.test = _call("_turn", node.test, work)
        return node

    visit_For = _with_turn

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_turn(node, MACRO)

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

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _call("_seen", node.key)  # it is hashed
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


def _call(name: str, argument: nodes.Expr, *args: int) -> nodes.Filter:
    """A call of one of the functions below: as a filter, because the sandbox looks into every other call."""
    return nodes.Filter(argument, name, [nodes.Const(arg) for arg in args], [], None, None)


# They are given the context so that the compiler does not call them.
@jinja2.pass_context
def _turn(_: Any, value: Any, work: int) -> Any:
    charge(work)
    return value


@jinja2.pass_context
def _out(_: Any, value: Any) -> Any:
    costs.charge_text(value)
    return value


@jinja2.pass_context
def _seen(_: Any, value: Any) -> Any:
    costs.charge_items(value)
    return value


@jinja2.pass_context
def _copied(_: Any, value: Any) -> Any:
    charge(costs.extent(value))
    return value


@jinja2.pass_context
def _concat(_: Any, values: list[Any]) -> str:
    costs.charge_text(values)
    return "".join(map(str, values))


@jinja2.pass_context
def _tuple(_: Any, values: list[Any]) -> tuple[Any, ...]:
    costs.charge_items(values)  # so that tuples of tuples cannot cost more to hash than they did to make
    return tuple(values)


def _range(*args: int) -> list[int]:
    """As a list, so that what looks through it is charged."""
    if any(abs(arg) > MAX_RANGE for arg in args):
        raise TooMuchError("it gives range too large a number")
    numbers = range(*args)
    charge(TURN * len(numbers))
    return list(numbers)


def _called(test: Any) -> Callable[..., Any]:
    """A test that is charged for being called."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> Any:
        charge(CALL)
        return test(*args, **kwargs)

    return run


def _charged(name: str, function: Any) -> Callable[..., Any]:
    """A filter or a test that is charged for what it goes over."""
    passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # a context or an environment comes first

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        args = (*args[:passed], *map(costs.listed, args[passed:]))
        costs.charge_filter(name, args[passed:], kwargs)
        return costs.result(function(*args, **kwargs))

    return run
