"""What can be chosen by name, each in a file of its own that is imported only when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import fields
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")


class Registry(MutableMapping[str, T]):
    """Names and what is registered under them, in order.

    An entry may be a place, "package.module:attribute": so help, completion and checks know the names without importing
    anything.
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


def with_options(kind: type[T], options: Any) -> T:
    """An instance of a dataclass whose fields are named after the options that it reads."""
    return kind(**{item.name: getattr(options, item.name) for item in fields(kind)})  # type: ignore[arg-type]
