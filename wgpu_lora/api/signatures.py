"""Signatures for functions whose options are the fields of a dataclass, so that `help` and editors list them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

F = TypeVar("F", bound=Callable[..., Any])


def listing(options: type, types: type, leave_out: Collection[str] = ()) -> Callable[[F], F]:
    """Replace a function's **options by the fields of `options`, in its signature and in the Args of its docstring.

    Args:
        options: a dataclass whose fields have a `help` in their metadata. types: a TypedDict with the same names.
        leave_out: fields that are parameters of the function already, by position or by name.
    """

    def add(function: F) -> F:
        signature = inspect.signature(function)
        hints = get_type_hints(types)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        own = [p.replace(kind=p.POSITIONAL_OR_KEYWORD) if p.kind is p.POSITIONAL_ONLY else p for p in own]
        listed = [f for f in fields(options) if f.name not in leave_out]
        named = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
            for f in listed
        ]
        function.__signature__ = signature.replace(parameters=[*own, *named])  # type: ignore[attr-defined]
        lines = [f"        {f.name} ({f.type}, default {f.default!r}): {_sentence(f.metadata['help'])}" for f in listed]
        before, heading, after = _parted(inspect.cleandoc(function.__doc__ or ""))
        text = "\n".join(line[4:] for line in lines)
        function.__doc__ = f"{before}\n{text}\n\n{heading}{after}"
        return function

    return add


def _parted(text: str) -> tuple[str, str, str]:
    """A docstring split into the part up to the end of its Args, the next heading, and the rest."""
    found = [(text.index(heading), heading) for heading in ("Returns:", "Raises:") if heading in text]
    place, heading = min(found)
    return text[:place].rstrip(), heading, text[place + len(heading) :]


def _sentence(text: str) -> str:
    """A help text for the middle of a line, with options spelled as arguments."""
    text = re.sub(r"--([a-z][a-z-]*)", lambda found: found[1].replace("-", "_"), text)
    return text[:1].lower() + text[1:] if text[1:2].islower() else text
