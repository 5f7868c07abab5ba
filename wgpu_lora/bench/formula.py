"""Formulas of contracts: numbers, names, operators, comparisons and a few functions."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping

from wgpu_lora.errors import UserError

ALLOWED = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.Call, ast.Name, ast.Load, ast.Constant,
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.USub,
    ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq, ast.And,
)  # fmt: skip
FUNCTIONS = {"min": min, "max": max, "ceil": math.ceil}


def evaluate(expression: str, names: Mapping[str, float], where: str) -> float:
    """The value of an expression such as `2 * T * H`; comparisons give 0 or 1.

    Args:
        names: the values of names.
        where: brick and key, which begin error messages.

    Raises:
        UserError: it is not such an expression, has no value, or a name is unknown.
    """
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        for node in ast.walk(tree):
            number = not isinstance(node, ast.Constant) or type(node.value) in (int, float)
            if not (number and isinstance(node, ALLOWED)):
                raise SyntaxError
        return float(eval(compile(tree, where, "eval"), {"__builtins__": {}, **FUNCTIONS}, dict(names)))
    except NameError as error:
        known = ", ".join(sorted(names))
        raise UserError(f"{where} uses the name {error.name}, which is not known: use one of {known}.") from None
    except SyntaxError:
        raise UserError(f"{where} is {expression!r}, which is not an arithmetic expression: correct it.") from None
    except (ArithmeticError, TypeError, ValueError) as error:
        raise UserError(f"{where} is {expression!r}, which has no value ({error}): correct it.") from None
