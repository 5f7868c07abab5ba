"""How options are declared: default, heading, help and allowed values. Help, completion and checks read this."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import Field, dataclass, field
from typing import Any

from wgpu_lora.bounded import is_name
from wgpu_lora.data.split import check_split
from wgpu_lora.errors import UserError
from wgpu_lora.names.naming import flag

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
    for other in ("eval_data", "eval_split"):
        if getattr(args, other) is not None:
            raise UserError(f"{flag('validation_split')} and {flag(other)} both hold rows out: leave one of them out.")


def require(fine: bool, name: str, rule: str, value: Any, hint: str = "") -> None:
    if not fine:
        raise UserError(f"{flag(name)} {rule}{hint}, not {value!s:.80}.")


def kinds(item: Field[Any]) -> list[str]:
    """The types of an option, by name: ['float', 'None']."""
    stated = item.type.__name__ if isinstance(item.type, type) else str(item.type)
    return [part.strip() for part in stated.split("|")]
