"""How options are declared: default, heading, help and allowed values. Help, completion and checks read this."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

from wgpu_lora.data.validation_split import check_split
from wgpu_lora.errors import UserError
from wgpu_lora.files.paths import is_name
from wgpu_lora.names.spelling import IN_FILE, flag, naming, setting

F32_TINY, F32_MAX = 1.1754943508222875e-38, 3.4028234663852886e38
FOREVER = -1.0  # of --wait without a number
TYPES = {"str": "text", "int": "a whole number", "float": "a number", "bool": "true or false"}


@dataclass(frozen=True)
class Range:
    """The allowed range of a number.

    unset: a number outside of it that stands for None. top: how messages show `below`, if not by its digits.
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    unset: float | None = None
    top: str | None = None

    def holds(self, value: float) -> bool:
        if self.unset is not None and value == self.unset:
            return True
        return (
            math.isfinite(value)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def rule(self) -> str:
        """The rule in an error message: 'must be greater than 0'."""
        upper = [f"at most {self.at_most:,g}"] if self.at_most is not None else []
        upper += [f"less than {self.top or f'{self.below:,g}'}"] if self.below is not None else []
        if self.at_least == 0 and not upper:
            return "must be 0 or more"
        lower = [f"greater than {self.above:g}"] if self.above is not None else []
        lower += [f"at least {self.at_least:g}"] if self.at_least is not None else []
        return f"must be {' and '.join(lower + upper)}"

    def __str__(self) -> str:
        """The range in help: 0<=x<1."""
        lower = f"{self.above:g}<x" if self.above is not None else ""
        lower = f"{self.at_least:g}<=x" if self.at_least is not None else lower
        upper = f"<={self.at_most:g}" if self.at_most is not None else ""
        upper = f"<{self.top or f'{self.below:g}'}" if self.below is not None else upper
        if upper or not lower:
            return f"{lower or 'x'}{upper}"
        return f"x>{self.above:g}" if self.above is not None else f"x>={self.at_least:g}"


POSITIVE, NOT_NEGATIVE = Range(above=0), Range(at_least=0)


def option(
    default: Any,
    panel: str,
    text: str,
    *,
    within: Range | None = None,
    choices: Collection[str] | None = None,
    hint: str = "",
) -> Any:
    """A field of TrainingArguments.

    Args:
        panel: its heading in help.
        within, choices: allowed values of a number or a name.
        hint: option to use for values out of range, named in the error.
    """
    return field(
        default=default, metadata={"help": text, "panel": panel, "within": within, "choices": choices, "hint": hint}
    )


def check(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    """Raise UserError if a value of the right type is not allowed; None passes."""
    if isinstance(value, str):
        require(is_name(value), name, "must be UTF-8 text without NUL", ascii(value))
    elif isinstance(value, bool) or value is None:
        return
    elif isinstance(value, int):
        require(-(2**31) <= value < 2**32, name, "must be a 32-bit whole number", value)
    elif math.isfinite(value):
        fits = value == 0 or F32_TINY <= abs(value) <= F32_MAX
        require(fits, name, "must be a number within float32's range", value)
    within, choices, hint = (metadata.get(key) for key in ("within", "choices", "hint"))
    if within is not None:
        endless = value == math.inf and within.at_most is None and within.below is None
        rule = within.rule() + " and finite" * endless
        require(within.holds(value), name, rule, value, f" (use {flag(hint)})" if hint else "")
    if choices is not None:
        require(value in choices, name, f"must be one of {', '.join(choices)}", value)


def check_heldout(args: Any) -> None:
    """Raise UserError unless at most one of the options that hold rows out is given, and its value is allowed."""
    if args.validation_split is None:
        return
    check_split(args.validation_split)
    for name in ("eval_data", "eval_split"):
        if getattr(args, name) is not None:
            raise UserError(f"{flag('validation_split')} and {flag(name)} both hold rows out: leave one of them out.")


def require(fine: bool, name: str, rule: str, value: Any, hint: str = "") -> None:
    if not fine:
        raise UserError(f"{flag(name)} {rule}{hint}, not {value!s:.80}.")


def kinds(item: Field[Any]) -> list[str]:
    """The types of an option, by name: ['float', 'None']."""
    annotation = item.type.__name__ if isinstance(item.type, type) else str(item.type)
    return [part.strip() for part in annotation.split("|")]


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


def from_options(kind: type[T], options: Any, selected_by: str) -> T:
    """Create an objective or optimizer from training options: those that its fields are named after, and its own."""
    shared = {item.name for item in fields(kind)} & {item.name for item in fields(options)}  # type: ignore[arg-type]
    values = {name: value for name in shared if (value := getattr(options, name)) is not None}  # else its own default
    return kind(**values, **_parse_args(kind, options, selected_by))


def normalized_args(kind: type, options: Any, selected_by: str) -> str | None:
    """Options of an implementation in a form that is the same for the same values; None if all have their defaults.

    Raises:
        UserError: a name is unknown or given twice, or a value is invalid.
    """
    arguments, usual = _parse_args(kind, options, selected_by), {item.name: item.default for item in fields(kind)}
    return (
        format_args({name: arguments[name] for name in usual if name in arguments and arguments[name] != usual[name]})
        or None
    )


def format_args(values: Mapping[str, Any]) -> str:
    """NAME=VALUE,..."""
    text = {name: str(value).lower() if isinstance(value, bool) else value for name, value in values.items()}
    return ",".join(f"{name}={value}" for name, value in text.items())


def _parse_args(kind: type, options: Any, selected_by: str) -> dict[str, Any]:
    option, shared_names = OWN_OPTIONS[selected_by], {item.name for item in fields(options)}
    options_by_name = {item.name: item for item in fields(kind) if item.name not in shared_names}
    result: dict[str, Any] = {}
    for part in filter(None, map(str.strip, (getattr(options, option) or "").split(","))):
        key, equals, text = (piece.strip() for piece in part.partition("="))
        name = key.replace("-", "_")
        if not equals:
            raise UserError(f"{flag(option)} must be NAME=VALUE, separated by commas, not {part!r:.80}.")
        if name not in options_by_name:
            selection = setting(selected_by, getattr(options, selected_by))
            advice = f"use {flag(name)}" if name in shared_names else _listed(options_by_name.values())
            raise UserError(f"{flag(option)}: {selection} has no option {key!r:.80} of its own: {advice}.")
        if name in result:
            raise UserError(f"{flag(option)} has {name!r} twice: leave one out.")
        result[name] = _value(options_by_name[name], text, option)
    return result


def _listed(options: Collection[Field[Any]]) -> str:
    """The choices, with the help of each."""
    text = (f"{o.name} ({o.metadata.get('help', '').rstrip('.') or TYPES[kinds(o)[0]]}; {o.default})" for o in options)
    return f"choose among {', '.join(text)}" if options else "it has none, so leave it out"


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
