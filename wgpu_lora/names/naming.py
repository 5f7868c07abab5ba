"""What options are called where they were given: --max-length on the command line, max_length in Python.

Whatever takes options from a person (the command line, a recipe's file) sets a naming for as long as it works with
them; without one it is Python's. Messages about options are made with `flag`, `setting` and `either`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Naming:
    """name: an option of TrainingArguments (or of a function) -> what it is called; setting: the same with a value;
    between: what stands between settings."""

    name: Callable[[str], str]
    setting: Callable[[str, Any], str]
    between: str = ", "


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _dashed_setting(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return _dashed(name if value else f"no_{name}")
    short = f"{value:g}" if isinstance(value, float) else ""
    return f"{_dashed(name)} {short if short and float(short) == value else value}"


PYTHON = Naming(lambda name: name, lambda name, value: f"{name}={value!r}")
COMMAND_LINE = Naming(_dashed, _dashed_setting, " ")
IN_FILE = Naming(
    lambda name: f"'{name}'",
    lambda name, value: f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}",
)
_CURRENT: ContextVar[Naming] = ContextVar("naming", default=PYTHON)


def flag(name: str) -> str:
    """What an option is called."""
    return _CURRENT.get().name(name)


def setting(name: str, value: Any) -> str:
    """An option with its value, as it would be given."""
    return _CURRENT.get().setting(name, value)


def settings(values: Mapping[str, Any]) -> str:
    """Several options with their values, as they would be given together."""
    return _CURRENT.get().between.join(setting(name, value) for name, value in values.items())


def either(*names: str) -> str:
    """Options of which one would do: `--a or --b`. Two that have the same name are said once."""
    return " or ".join(dict.fromkeys(map(flag, names)))


@contextmanager
def naming(new: Naming) -> Iterator[None]:
    """Messages that are made meanwhile call options so."""
    token = _CURRENT.set(new)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def renamed(names: Mapping[str, str], base: Naming | None = None) -> Naming:
    """A naming (the current one by default) in which some options have other names."""
    of = base or _CURRENT.get()
    return Naming(
        lambda name: of.name(names.get(name, name)),
        lambda name, value: of.setting(names.get(name, name), value),
        of.between,
    )
