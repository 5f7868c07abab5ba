"""Insert charges into a chat template's syntax tree before it is compiled (data/sandbox.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from wgpu_lora.data import sandbox_costs as costs
from wgpu_lora.data.sandbox_costs import TURN, TooMuchError, charge

MAX_NODES = 3000  # of a syntax tree; published ones have up to 1,300
MACRO = 256
STATEMENTS = (
    nodes.Template, nodes.Output, nodes.For, nodes.If, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.With,
    nodes.Assign, nodes.AssignBlock, nodes.ExprStmt, nodes.Break, nodes.Continue,
)  # fmt: skip


def size(node: nodes.Node) -> int:
    """The number of nodes of a tree, counted up to MAX_NODES + 1."""
    stack, count = [node], 0
    while stack and count <= MAX_NODES:
        count += 1
        stack += stack.pop().iter_child_nodes()
    return count


class Counting(NodeTransformer):
    """Inserts charges for operations that are not calls: iterations, output, comparisons, `~`, tuples and dicts."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if isinstance(node, nodes.Stmt | nodes.Template) and not isinstance(node, STATEMENTS):
            raise TooMuchError(f"it has a statement ({type(node).__name__}) that is not supported")
        return super().generic_visit(node, *args, **kwargs)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        if isinstance(node.value, int):
            costs.check_bits(node.value.bit_length())
        return node

    def _with_turn(self, node: Any, work: int = TURN) -> nodes.Node:
        work += size(node)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call(_turn, nodes.Const(None), work)).set_lineno(node.lineno))
        if getattr(node, "test", None) is not None:
            node.test = _call(_turn, node.test, work)
        return node

    visit_For = _with_turn

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_turn(node, MACRO)

    visit_CallBlock = visit_Macro

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        texts = [nodes.Const(n.data) if isinstance(n, nodes.TemplateData) else n for n in node.nodes]
        node.nodes = [_call(_out, text) for text in texts]
        return node.set_lineno(node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _call(_seen, node.expr)
        for operand in node.ops:
            operand.expr = _call(_seen, operand.expr)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _call(_key, node.key)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _call(_copied, node.node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call(_concat, nodes.List(node.nodes))

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _call(_tuple, nodes.List(node.items)) if node.ctx == "load" else node


def _call(function: Callable[..., Any], argument: nodes.Expr, *args: int) -> nodes.Filter:
    """A call of one of the functions below, as a filter, since the sandbox charges other calls."""
    return nodes.Filter(argument, _name(function), [nodes.Const(arg) for arg in args], [], None, None)


# `pass_context` keeps the compiler from evaluating them.
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
def _key(_: Any, value: Any) -> Any:
    costs.charge_key(value)
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
    costs.charge_items(values)  # so that hashing nested tuples is paid for
    return tuple(values)


def _name(function: Callable[..., Any]) -> str:
    """A name that no template can use: it is not an identifier, and the sandbox refuses to look it up."""
    return f"<{function.__name__}>"


HOOKS = {_name(f): f for f in (_turn, _out, _seen, _key, _copied, _concat, _tuple)}
