"""Spelling of options in messages: --max-length on the command line, max_length in Python.

Code that takes options from the command line or a file sets a naming while it uses them; the default is Python's.
Messages spell options with `flag`, `setting` and `any_option`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from wgpu_lora.errors import UserError


@dataclass(frozen=True)
class Naming:
    """How to spell options.

    name: option of TrainingArguments or of a function -> its spelling; setting: the same with a value; between: the
    separator of settings.
    """

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
IN_JSON = Naming(lambda name: f"'{name}'", lambda name, value: f'"{name}": {json.dumps(value, default=str)}')
_CURRENT: ContextVar[Naming] = ContextVar("naming", default=PYTHON)


def flag(name: str) -> str:
    """The current spelling of an option."""
    return _CURRENT.get().name(name)


def setting(name: str, value: Any) -> str:
    """The current spelling of an option with its value."""
    return _CURRENT.get().setting(name, value)


def settings(values: Mapping[str, Any]) -> str:
    """The current spelling of several options with their values."""
    return _CURRENT.get().between.join(setting(name, value) for name, value in values.items())


def any_option(*names: str) -> str:
    """Alternative options: `--a or --b`. Options with the same spelling appear once."""
    return " or ".join(dict.fromkeys(map(flag, names)))


@contextmanager
def naming(new: Naming) -> Iterator[None]:
    """Use a naming for messages that are created in the block."""
    token = _CURRENT.set(new)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@contextmanager
def error_source(where: str, names: Naming) -> Iterator[None]:
    """Errors of the block begin with where values come from, and spell options by these names."""
    try:
        with naming(names):
            yield
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(where) else f"{where}: {text}") from None


def with_renamed_options(names: Mapping[str, str], base: Naming | None = None) -> Naming:
    """A variant of a naming (default: the current one) in which some options have other names."""
    of = base or _CURRENT.get()
    return Naming(
        lambda name: of.name(names.get(name, name)),
        lambda name, value: of.setting(names.get(name, name), value),
        of.between,
    )
