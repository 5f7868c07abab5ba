"""Whether a held-out answer's function already occurs in the rows that a model was trained on.

A function's fingerprint is its syntax tree with every name (function, argument, variable, builtin) replaced by the
order of its first appearance, and without constants, docstrings, decorators and annotations. Functions that differ
only in names or numbers therefore count as equal: `x % 2 == 0` and `x % 7 == 3` have one fingerprint.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def fingerprints(source: str) -> Iterator[str]:
    """The fingerprint of every function in `source`, including nested ones and methods; none if it is not Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            # In place: the functions inside come later, and renaming them again from their own start is harmless.
            yield _fingerprint(node)


def _fingerprint(function: ast.AST) -> str:
    for node in ast.walk(function):
        if isinstance(node, FUNCTIONS):
            documented = ast.get_docstring(node, clean=False) is not None
            node.body, node.decorator_list, node.returns = node.body[documented:], [], None
        elif isinstance(node, ast.arg):
            node.annotation = None
    names: dict[str, str] = {}
    for node in ast.walk(function):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                node.name = names.setdefault(node.name, f"v{len(names)}")
            case ast.arg():
                node.arg = names.setdefault(node.arg, f"v{len(names)}")
            case ast.Name():
                node.id = names.setdefault(node.id, f"v{len(names)}")
            case ast.Constant():
                node.value = node.kind = None
    return ast.dump(function).replace("AsyncFunctionDef(", "FunctionDef(")


def answer(row: dict) -> str:
    """The assistant's text in a `messages` row."""
    return row["messages"][-1]["content"]


def find_leaks(heldout: Iterable[dict], seen: Iterable[str]) -> list[str]:
    """The held-out answers whose function also occurs in one of the `seen` source texts."""
    wanted = [(print_, answer(row)) for row in heldout for print_ in fingerprints(answer(row))]
    prints = {print_ for print_, _ in wanted}
    hit = {print_ for text in seen for print_ in fingerprints(text) if print_ in prints}
    return [text for print_, text in wanted if print_ in hit]
