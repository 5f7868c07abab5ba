"""Tables of cluster.toml as dataclasses: strict names and types, with advice on others."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from wgpu_lora.errors import UserError
from wgpu_lora.names.aliases import nearest
from wgpu_lora.names.spelling import IN_FILE, naming
from wgpu_lora.text import join_words
from wgpu_lora.typed_json import read_as

T = TypeVar("T")


def check_keys(values: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raise UserError for a key that is not known, with the nearest one; `where` begins the message."""
    for key in values:
        if key not in known:
            with naming(IN_FILE):
                meant = nearest(key.replace("-", "_"), known)
            text = f"did you mean {meant}?" if meant else f"choose among {join_words([*known])}."
            raise UserError(f"{where} has an unknown key {key!a:.60}: {text}")


def table_of(kind: type[T], values: Any, where: str) -> T:
    """A table as a dataclass, which checks its own values; `where` begins error messages.

    Raises:
        UserError: a key is unknown or missing, or a value has another type or is not allowed.
    """
    with in_file(where):
        return read_as(kind, values, where)


@contextmanager
def in_file(where: str) -> Iterator[None]:
    """Errors of the block begin with `where`, and spell options as a file has them."""
    try:
        with naming(IN_FILE):
            yield
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(where) else f"{where}: {text}") from None
