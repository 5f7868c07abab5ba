"""NVIDIA's management library, where the extra `nvml` is installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")


def ask_nvml(ask: Callable[[Any, list[Any]], T]) -> T | None:
    """What `ask` returns, given NVML and its handles of all cards; None without nvidia-ml-py or its driver, or if NVML
    fails."""
    try:
        nvml: Any = import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        try:
            return ask(nvml, [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())])
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return None
