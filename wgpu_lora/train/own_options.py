"""Options of an objective's or an optimizer's own: the fields of its dataclass that are not options of training.

They are given together, as --objective-args (--optim-args) NAME=VALUE,..., like transformers' optim_args. Their
declarations are read when they are given, so that help imports no implementation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, fields
from typing import Any, TypeVar

from wgpu_lora.errors import UserError
from wgpu_lora.names.naming import IN_FILE, flag, naming, setting
from wgpu_lora.train.declared import TYPES, Range, check, kinds, option

T = TypeVar("T")
OWN_OPTIONS = {"objective": "objective_args", "optim": "optim_args"}  # by the option that selects the implementation
SWITCH = {"true": True, "false": False}
READERS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": lambda text: SWITCH[text.lower()],
}


def own_option(default: Any, text: str, *, within: Range | None = None, choices: Collection[str] | None = None) -> Any:
    """A field of an objective or optimizer that is an option of its own; its type is str, int, float or bool."""
    return option(default, "", text, within=within, choices=choices)


def created(kind: type[T], options: Any, selected_by: str) -> T:
    """Create an objective or optimizer from training options: those that its fields are named after, and its own."""
    shared = {item.name for item in fields(kind)} & {item.name for item in fields(options)}  # type: ignore[arg-type]
    return kind(**{name: getattr(options, name) for name in shared}, **_given(kind, options, selected_by))


def checked(kind: type, options: Any, selected_by: str) -> str | None:
    """The given own options in a form that is the same for the same values; None if all have their defaults.

    Raises:
        UserError: a name is unknown or given twice, or a value is invalid.
    """
    given, usual = _given(kind, options, selected_by), {item.name: item.default for item in fields(kind)}
    return as_text({name: given[name] for name in usual if name in given and given[name] != usual[name]}) or None


def as_text(values: Mapping[str, Any]) -> str:
    """NAME=VALUE,..."""
    said = {name: str(value).lower() if isinstance(value, bool) else value for name, value in values.items()}
    return ",".join(f"{name}={value}" for name, value in said.items())


def _given(kind: type, options: Any, selected_by: str) -> dict[str, Any]:
    option, known = OWN_OPTIONS[selected_by], {item.name for item in fields(options)}
    own = {item.name: item for item in fields(kind) if item.name not in known}
    found: dict[str, Any] = {}
    for part in filter(None, map(str.strip, (getattr(options, option) or "").split(","))):
        key, equals, text = (piece.strip() for piece in part.partition("="))
        name = key.replace("-", "_")
        if not equals:
            raise UserError(f"{flag(option)} must be NAME=VALUE, separated by commas, not {part!r:.80}.")
        if name not in own:
            chosen = setting(selected_by, getattr(options, selected_by))
            advice = f"use {flag(name)}" if name in known else _listed(own.values())
            raise UserError(f"{flag(option)}: {chosen} has no option {key!r:.80} of its own: {advice}.")
        if name in found:
            raise UserError(f"{flag(option)} has {name!r} twice: leave one out.")
        found[name] = _value(own[name], text, option)
    return found


def _listed(own: Collection[Field[Any]]) -> str:
    """What there is, with the help of each."""
    said = (f"{o.name} ({o.metadata.get('help', '').rstrip('.') or TYPES[kinds(o)[0]]}; {o.default})" for o in own)
    return f"choose among {', '.join(said)}" if own else "it has none, so leave it out"


def _value(item: Field[Any], text: str, option: str) -> Any:
    """A value of the field's type, within its range."""
    kind = kinds(item)[0]
    try:
        value: Any = READERS[kind](text)
        if kind == "float" and not math.isfinite(value):
            raise ValueError
    except (ValueError, KeyError):
        raise UserError(f"{flag(option)}: {item.name!r} must be {TYPES[kind]}, not {text!r:.80}.") from None
    try:
        with naming(IN_FILE):
            check(item.name, value, item.metadata)
    except UserError as error:
        raise UserError(f"{flag(option)}: {error}") from None
    return value
