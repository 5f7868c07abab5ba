"""The interface of a source: a function that finds a device's status, and one that reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wgpu_lora.gpu.devices import DeviceInfo


@dataclass(frozen=True)
class Status:
    """What is known of a device now; None is unknown.

    temperature: in degrees Celsius. busy: share of time in use, in percent. power, power_limit: in watts.
    memory: in use by all programs, in GiB.
    """

    temperature: float | None = None
    busy: float | None = None
    power: float | None = None
    power_limit: float | None = None
    memory: float | None = None


Read = Callable[[], Status]
Find = Callable[[DeviceInfo], Read | None]
GIB = 2.0**30


def scaled(value: float | None, by: float) -> float | None:
    return None if value is None else value * by
