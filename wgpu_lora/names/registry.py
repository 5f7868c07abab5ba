"""Registries of implementations that are chosen by name and imported on first use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import TypeVar

T = TypeVar("T")


class Registry(MutableMapping[str, T]):
    """An ordered mapping from names to implementations.

    An entry may be given as "package.module:attribute", so that help, completion and checks can list the names without
    importing anything.

    Args:
        patterns: names that exist but are not listed, because they follow a pattern: regular expressions of whole
            names, each with a function from the name to its implementation.
    """

    def __init__(self, entries: Mapping[str, T | str], patterns: Mapping[str, str] | None = None):
        self._entries: dict[str, T | str] = dict(entries)
        self._patterns = patterns or {}

    def __getitem__(self, name: str) -> T:
        entry = (
            self._entries[name] if name in self._entries or not self._is_other(name) else self._resolve_pattern(name)
        )
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            result: T = getattr(import_module(module), attribute)
            entry = self._entries[name] = result
        return entry

    def __setitem__(self, name: str, entry: T | str) -> None:
        self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries or self._is_other(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _is_other(self, name: object) -> bool:
        return isinstance(name, str) and any(re.fullmatch(pattern, name) for pattern in self._patterns)

    def _resolve_pattern(self, name: str) -> T | str:
        of_name = next(of_name for pattern, of_name in self._patterns.items() if re.fullmatch(pattern, name))
        module, _, function = of_name.partition(":")
        result: T = getattr(import_module(module), function)(name)
        return result
