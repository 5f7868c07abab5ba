"""How a hostile file is to be refused."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from wgpu_lora.errors import UserError


@contextmanager
def memory_below(most: int) -> Iterator[None]:
    """Python never holds more than so many bytes of new memory in the block."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def refused(read: Callable[[], object], words: str) -> None:
    """The reading ends in a UserError with these words, and never holds 64 MiB."""
    with memory_below(64 << 20), pytest.raises(UserError, match=words):
        read()
