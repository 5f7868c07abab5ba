"""Arithmetic in a brick's contract: numbers, names, operators, comparisons and a few functions, and nothing else."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from wgpu_lora.errors import UserError

OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
FUNCTIONS: dict[str, Callable[..., float]] = {"min": min, "max": max, "ceil": math.ceil}


def evaluate(expression: str, names: Mapping[str, float], where: str) -> float:
    """The value of an expression such as `2 * T * H`; comparisons and `and` give 0 or 1.

    Args:
        names: what a name stands for.
        where: names the brick and the key in errors.

    Raises:
        UserError: it is no such expression, a name is unknown, or it has no value.
    """
    try:
        return float(_value(ast.parse(expression.strip(), mode="eval").body, names))
    except KeyError as error:
        known = ", ".join(sorted(names))
        raise UserError(f"{where} uses the name {error.args[0]}, which is not known: use one of {known}.") from None
    except SyntaxError:
        raise UserError(f"{where} is {expression!r}, which is no arithmetic expression: correct it.") from None
    except (ArithmeticError, TypeError, ValueError) as error:
        raise UserError(f"{where} is {expression!r}, which has no value ({error}): correct it.") from None


def _value(node: ast.expr, names: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.Name(id=name):
            return names[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left, names), _value(right, names))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, names)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in OPERATORS:
            return float(OPERATORS[type(op)](_value(left, names), _value(right, names)))
        case ast.BoolOp(op=ast.And(), values=values):
            return float(all(_value(v, names) for v in values))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](*(_value(a, names) for a in args))
    raise SyntaxError
