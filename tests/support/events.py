"""Listeners made of plain functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wgpu_lora.events import Events


def hearing(**functions: Callable[..., Any]) -> Events:
    """An Events that calls these functions, by the names of its methods."""
    events = Events()
    for name, function in functions.items():
        assert hasattr(Events, name), name
        setattr(events, name, function)
    return events
