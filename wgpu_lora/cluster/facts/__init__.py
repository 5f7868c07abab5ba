"""What the parts of a cluster tell each other: JSON values, as dataclasses."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, TypeVar

from wgpu_lora.cluster.facts.nodes import DeviceFacts, NodeFacts, Versions
from wgpu_lora.cluster.facts.orders import Answer, CacheStanding, Copy, Order, Progress, Report
from wgpu_lora.cluster.facts.requests import RunRequest, Sweep, Task, Taught
from wgpu_lora.cluster.facts.views import DeviceView, Line, RunView, Snapshot, TaskView
from wgpu_lora.train.memory import RunRequirements
from wgpu_lora.typed_json import typed

__all__ = [
    "COORDINATOR",
    "NAMESPACE",
    "Answer",
    "CacheStanding",
    "Copy",
    "DeviceFacts",
    "DeviceView",
    "Line",
    "NodeFacts",
    "Order",
    "Progress",
    "Report",
    "RunRequest",
    "RunRequirements",
    "RunView",
    "Snapshot",
    "Sweep",
    "Task",
    "TaskView",
    "Taught",
    "Versions",
    "from_plain",
    "to_plain",
]

T = TypeVar("T")
NAMESPACE = "wgpu-lora"  # of all our actors, in Ray
COORDINATOR = "coordinator"  # the name of its actor


def to_plain(value: Any) -> dict[str, Any]:
    """A fact as JSON values."""
    return asdict(value)


def from_plain(kind: type[T], value: Any) -> T:
    """A fact from JSON values of this or a newer version.

    Raises:
        ValueError: a field is missing or has another type.
    """
    return typed(kind, value, kind.__name__)  # type: ignore[no-any-return]
