"""How a hostile file is to be refused."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest

from wgpu_lora.errors import UserError


def refused(read: Callable[[], object], words: str) -> None:
    """The reading ends in a UserError with these words, and never holds 64 MiB."""
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=words):
            read()
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
