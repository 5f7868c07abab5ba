"""Is any held-out answer's function already in the rows a model was trained on?

A function's fingerprint is its syntax tree with every name (function, argument, variable, builtin) replaced by the
order of its first appearance and every constant masked. Two functions that differ only in names or numbers are thus
the same, which is far stricter than comparing text: `x % 2 == 0` and `x % 7 == 3` have one fingerprint.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from copy import deepcopy

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class _Canonical(ast.NodeTransformer):
    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def _rename(self, name: str) -> str:
        return self.names.setdefault(name, f"v{len(self.names)}")

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(id=self._rename(node.id), ctx=node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(arg=self._rename(node.arg), annotation=None)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant(value=None)

    def visit_FunctionDef(self, node: FunctionNode) -> ast.AST:
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        # Decorators and annotations are left out: they do not make another function of the same body.
        return ast.FunctionDef(
            name=self._rename(node.name),
            args=self.visit(node.args),
            body=[self.visit(statement) for statement in body],
            decorator_list=[],
            returns=None,
            type_comment=None,
        )

    visit_AsyncFunctionDef = visit_FunctionDef


def fingerprints(source: str) -> Iterator[str]:
    """The fingerprint of every function in `source`, nested ones and methods too. Unparsable text has none."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    # The transformer edits nodes in place and numbers names from the function's own start, so where functions are
    # nested each needs a copy of its own.
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in functions:
        yield ast.dump(_Canonical().visit(node if len(functions) == 1 else deepcopy(node)))


def answer(row: dict) -> str:
    """The assistant's text in a `messages` row."""
    return row["messages"][-1]["content"]


def find_leaks(heldout: Iterable[dict], seen: Iterable[str]) -> list[str]:
    """The held-out answers whose function also occurs in one of the `seen` source texts."""
    wanted: dict[str, list[str]] = {}
    for row in heldout:
        for print_ in fingerprints(answer(row)):
            wanted.setdefault(print_, []).append(answer(row))
    hit = {print_ for text in seen for print_ in fingerprints(text) if print_ in wanted}
    return [text for print_ in sorted(hit) for text in wanted[print_]]
