"""Parse a row's check into the calls that an answer has to compute and the assertions about their results.

The calls run in the answer's process; the assertions are evaluated here, on the plain data that it returns.
"""

from __future__ import annotations

import ast
import builtins
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.names.text import escape_unprintable
from wgpu_lora.train.checks.sandbox import plain_data

MAX_CHECK = 1 << 16  # characters
SHOWN = 80  # characters of a value in a reason
FORM = "write asserts that compare calls such as f([1], key=2) with literals, joined by and, or, not"
OPERATORS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, group: item in group,
    ast.NotIn: lambda item, group: item not in group,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


class RaisedError(Exception):
    """A call raised, or did not return plain data; the text says why."""


Outcome = Callable[[], Any]  # a call's value; raises RaisedError
Test = Callable[[Sequence[Outcome]], Any]


@dataclass(frozen=True)
class Assertion:
    """One assert. calls: (name, arguments, keyword arguments), the latter two encoded by plain.dump."""

    text: str
    message: str | None
    calls: tuple[tuple[str, str, str], ...]
    _test: Test

    def judge(self, outcomes: Sequence[Outcome]) -> str | None:
        """The reason why the assertion fails, given the outcomes of its calls; None if it holds."""
        try:
            if self._test(outcomes):
                return None
            values = [short_repr(outcome()) for outcome in outcomes]
        except RaisedError as error:
            return str(error)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            return f"{type(error).__name__}: {error}"
        reason = "" if self.message is None else f": {self.message}"
        subject = f"{self.calls[0][0]} returned" if len(values) == 1 else "the calls returned"
        return f"assertion failed{reason}: {self.text}, where {subject} {', '.join(values)}"


def parse_check(check: Any, where: str = "A row") -> tuple[Assertion, ...]:
    """Parse the asserts of a check.

    Args:
        where: start of the error messages.

    Raises:
        UserError: the check does not consist of asserts of the supported form (FORM).
    """
    if not isinstance(check, str) or len(check) > MAX_CHECK:
        raise UserError(f'{where} has a "check" that is not a text of at most {MAX_CHECK:,} characters: fix it.')
    try:
        body = ast.parse(check).body
        result = tuple(_assertion(statement) for statement in body)
    except (SyntaxError, ValueError) as error:
        why = escape_unprintable(" ".join(str(error).split()))
        raise UserError(f'{where} has a "check" that cannot be parsed ({why}): {FORM}.') from None
    except (MemoryError, RecursionError):
        raise UserError(f'{where} has a "check" that cannot be parsed (nested too deeply): {FORM}.') from None
    if not result:
        raise UserError(f'{where} has a "check" without an assert, which any answer would pass: add one.')
    return result


def short_repr(value: Any) -> str:
    """A value as text, for messages."""
    try:
        text = repr(value)
    except ValueError:  # more digits than Python prints
        text = "a value with very many digits"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _assertion(statement: ast.stmt) -> Assertion:
    if not isinstance(statement, ast.Assert):
        raise ValueError(f"{_quoted(statement)} is not an assert")
    message = None if statement.msg is None else _message(statement.msg)
    calls: list[tuple[str, str, str]] = []
    test = _compile(statement.test, calls)
    if not calls:
        raise ValueError(f"{_quoted(statement)} calls nothing")
    return Assertion(ast.unparse(statement.test), message, tuple(calls), test)


def _compile(node: ast.expr, calls: list[tuple[str, str, str]]) -> Test:
    """Compile an expression to a function of its calls' outcomes; adds the calls to `calls`. Raises ValueError."""
    match node:
        case ast.Call(func=ast.Name(id="set"), args=[], keywords=[]):
            pass  # the literal of an empty set
        case ast.Call(func=ast.Name(id=name)) if hasattr(builtins, name):
            raise ValueError(f"{_quoted(node)} calls Python's built-in {name} instead of the answer")
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            keyword_values = {str(word.arg): _literal(word.value) for word in keywords if word.arg is not None}
            if len(keyword_values) < len(keywords):
                raise ValueError(f"{_quoted(node)} has ** in it, or a name twice")
            calls.append((name, plain_data.dump([_literal(arg) for arg in args]), plain_data.dump(keyword_values)))
            index = len(calls) - 1
            return lambda outcomes: outcomes[index]()
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            sides = [_compile(side, calls) for side in (left, *comparators)]
            if any(isinstance(op, ast.Is | ast.IsNot) for op in ops) and not all(map(_is_single, comparators)):
                raise ValueError(f"{_quoted(node)} compares by identity")
            return lambda outcomes: _compare([OPERATORS[type(op)] for op in ops], (side(outcomes) for side in sides))
        case ast.BoolOp(op=op, values=values):
            parts = [_compile(value, calls) for value in values]
            join = all if isinstance(op, ast.And) else any
            return lambda outcomes: join(part(outcomes) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _compile(operand, calls)
            return lambda outcomes: not inner(outcomes)
    value = _literal(node)
    return lambda outcomes: value


def _compare(operators: list[Callable[[Any, Any], Any]], sides: Iterator[Any]) -> bool:
    left = next(sides)
    for apply, right in zip(operators, sides, strict=True):
        if not apply(left, right):
            return False
        left = right
    return True


def _literal(node: ast.expr) -> Any:
    """The value of a literal. Raises ValueError."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError) as error:  # a TypeError names an unhashable set member or key
        why = f" ({error})" if isinstance(error, TypeError) else ""
        raise ValueError(f"{_quoted(node)} is not a literal{why}") from None
    if any(isinstance(part, ast.Constant) and part.value is ... for part in ast.walk(node)):
        raise ValueError(f"{_quoted(node)} has an ellipsis, which is not plain data")
    plain_data.dump(value)  # refuses values that are too large
    return value


def _message(node: ast.expr) -> str:
    """The message of an assert; expressions other than strings are shown as source code."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ast.unparse(node)[:SHOWN]


def _quoted(node: ast.AST) -> str:
    """A node's source code on one line, shortened."""
    text = " ".join(ast.unparse(node).split())
    return f"'{text}'" if len(text) <= SHOWN else f"'{text[:SHOWN]}...'"


def _is_single(node: ast.expr) -> bool:
    """Whether a node is None, True or False, which are singletons in both processes."""
    return isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool))
