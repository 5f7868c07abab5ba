"""Answers between actors: JSON values, bytes, and refusals instead of exceptions of ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from wgpu_lora.cluster.node.shelf import Fenced
from wgpu_lora.errors import UserError

Method = TypeVar("Method", bound=Callable[..., Any])


def plainly(method: Method) -> Method:
    """A method of an actor that returns {"refused": sentence} where it would raise UserError."""

    @functools.wraps(method)
    def answer(*arguments: Any, **named: Any) -> Any:
        try:
            return method(*arguments, **named)
        except Fenced as error:
            return {"refused": str(error), "fenced": True}
        except UserError as error:
            return {"refused": str(error)}

    return answer  # type: ignore[return-value]


def accepted(answer: Any) -> Any:
    """An answer, unless it is a refusal. Raises Fenced or UserError."""
    if isinstance(answer, dict) and "refused" in answer:
        raise (Fenced if answer.get("fenced") else UserError)(answer["refused"])
    return answer
