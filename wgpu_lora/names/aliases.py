"""Resolve option names of other programs and typing errors to the option meant, or to advice."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.names.foreign_options import ALIASES, REFUSED, VALUES
from wgpu_lora.names.spelling import any_option, flag, setting

_MARK = re.compile(r"\{(\w+)(?:=([^}]*))?\}")
SIMILAR = 0.8  # least similarity of names, from 0 to 1
OPTIONS_BY_ALIAS = {name: options for options, names in ALIASES.items() for name in names.split()}


def aliases_of(valid_names: Collection[str]) -> dict[str, str]:
    """Aliases -> the options of a command, without names that are options of the command themselves."""
    return _aliases_of(frozenset(valid_names))


@lru_cache
def _aliases_of(valid_names: frozenset[str]) -> dict[str, str]:
    result = {}
    for name, options in OPTIONS_BY_ALIAS.items():
        target = next((option for option in options if option in valid_names), None)
        if target and name not in valid_names:
            result[name] = target
    return result


def foreign_option_advice(name: str, valid_names: Collection[str]) -> str | None:
    """The advice for an option of other programs, as a sentence; None if it names options that this command lacks."""
    for advice, names in REFUSED:
        if name in names.split() and {option for option, _ in _MARK.findall(advice)} <= set(valid_names):
            return f"{flag(name)} {_MARK.sub(_spelled, advice)}."
    return None


def _spelled(mark: re.Match[str]) -> str:
    if mark[2] is None:
        return flag(mark[1])
    try:
        return setting(mark[1], ast.literal_eval(mark[2]))
    except (ValueError, SyntaxError):
        return setting(mark[1], mark[2])


def nearest(name: str, valid_names: Collection[str]) -> str | None:
    """The options, in their current spelling, that an unknown name may mean, by a typing error or an abbreviation."""
    aliases = aliases_of(valid_names)
    longer = [option for option in valid_names if len(name) > 2 and option.startswith(name)]
    similar = difflib.get_close_matches(name, [*valid_names, *aliases], n=1, cutoff=SIMILAR)
    matches = [aliases.get(option, option) for option in similar or sorted(longer, key=len)[:2]]
    return any_option(*matches) or None


def advice(name: str, valid_names: Collection[str], otherwise: str) -> str:
    """The advice for an unknown name: the options that may be meant, or else `otherwise`."""
    suggestion = nearest(name, valid_names)
    return f"did you mean {suggestion}?" if suggestion else otherwise


def real_names(
    values: Mapping[str, Any],
    valid_names: Collection[str],
    where: str,
    kind: str = "option",
    otherwise: str | None = None,
) -> dict[str, Any]:
    """Values by option name: resolves aliases and dashes, and converts NumPy numbers to Python's.

    Args:
        where: where the values come from; starts the error messages.
        kind: what the names are called in error messages.
        otherwise: advice if no option is similar; by default, where to find the list of training options.

    Raises:
        UserError: a name is unknown, or two names stand for the same option.
    """
    in_python = flag("a_name") == "a_name"
    listed = "help(wgpu_lora.finetune)" if in_python else "'wgpu-lora finetune --help-all'"
    otherwise = otherwise or f"{listed} lists the options."
    aliases = aliases_of(valid_names)
    result: dict[str, Any] = {}
    spellings: dict[str, str] = {}
    for key, value in values.items():
        typed = str(key).replace("-", "_")
        name = aliases.get(typed, typed)
        if name not in valid_names:
            sentence = foreign_option_advice(typed, [*valid_names, "recipe"])
            if sentence:
                raise UserError(f"{where}: {sentence}")
            raise UserError(f"{where} has an unknown {kind} '{key}': {advice(typed, valid_names, otherwise)}")
        if name in result:
            raise UserError(f"{where}: {flag(spellings[name])} and {flag(typed)} are the same {kind}: leave one out.")
        result[name], spellings[name] = _builtin(value), typed
    return result


def real_value(name: str, value: Any) -> Any:
    """Resolve the value of an option if other programs call it differently."""
    values = VALUES.get(name, {}) if isinstance(value, str) else {}
    return next((real for real, aliases in values.items() if value in aliases.split()), value)


def _builtin(value: Any) -> Any:
    """Convert a NumPy number, for example from a sweep, to a Python number."""
    if isinstance(value, bool | int | float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)
