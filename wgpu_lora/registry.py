"""Registries of implementations that are chosen by name and imported on first use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import TypeVar

T = TypeVar("T")


class Registry(MutableMapping[str, T]):
    """An ordered mapping from names to implementations.

    An entry may be given as "package.module:attribute", so that help, completion and checks can list the names without
    importing anything.
    """

    def __init__(self, entries: Mapping[str, T | str]):
        self._entries: dict[str, T | str] = dict(entries)

    def __getitem__(self, name: str) -> T:
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            found: T = getattr(import_module(module), attribute)
            entry = self._entries[name] = found
        return entry

    def __setitem__(self, name: str, entry: T | str) -> None:
        self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
