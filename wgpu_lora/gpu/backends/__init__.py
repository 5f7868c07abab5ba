"""The WebGPU implementations that kernels can run on: wgpu-native, or Dawn where it is installed."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from wgpu_lora.errors import UserError
from wgpu_lora.names.spelling import flag

ENVIRONMENT = "WGPU_LORA_BACKEND"
WGPU, DAWN, AUTO = "wgpu", "dawn", "auto"
BACKENDS = (AUTO, WGPU, DAWN)
SUBGROUP = "subgroup"  # wgpu-native's spelling of the feature, which all backends report


@dataclass(frozen=True)
class MatrixConfiguration:
    """A product of subgroup matrices, m x k times k x n, that a device computes. Types are those of WGSL.

    lanes: of the subgroups that compute it.
    """

    m: int
    n: int
    k: int
    inputs: str
    sums: str
    lanes: int


class Backend(Protocol):
    """A WebGPU implementation with wgpu-py's API.

    Attributes:
        name: as `--backend` has it.
        api: the module, for flags and the classes of errors.
    """

    name: str
    api: Any

    def versions(self) -> dict[str, str]:
        """Versions by library."""

    def library(self) -> Path:
        """The file that computes."""

    def adapters(self) -> list[Any]:
        """The devices of this machine that are not opened yet."""

    def features(self, adapter: Any) -> frozenset[str]:
        """Features of an adapter, in wgpu-native's spelling."""

    def matrices(self, adapter: Any) -> tuple[MatrixConfiguration, ...]:
        """The products of subgroup matrices that an adapter says it computes."""

    def open(self, adapter: Any, features: list[str], limits: dict[str, int], checked: bool) -> Any:
        """A device with these features. checked: whether shaders check the bounds of every access."""

    def module(self, device: Any, code: str, label: str, checked: bool) -> Any:
        """The shader module of a WGSL text. Raises `api.GPUError`."""

    def wait(self, device: Any) -> None:
        """Block until the queue of a device is empty."""

    def timestamp_period(self, device: Any) -> float:
        """Seconds of a timestamp's unit."""


def tint_text(code: str) -> str:
    """A WGSL text as Tint takes it, Dawn's and Chromium's compiler, which wants extensions named."""
    if not re.search(r"subgroup[A-Z_]", re.sub("//.*", "", code)):
        return code
    # Kernels broadcast under bounds that are the same in all lanes, which Tint cannot prove.
    return f"enable subgroups;\ndiagnostic(off, subgroup_uniformity);\n{code}"


def installed(name: str) -> bool:
    """Whether a backend's library is there."""
    return name != DAWN or importlib.util.find_spec("wgpudawn") is not None


def check_backend(name: str) -> None:
    """Raises UserError if there is no such backend, or it is not installed."""
    if name not in BACKENDS:
        raise UserError(f"There is no backend {name!r}: choose one of {', '.join(BACKENDS)}.")
    if name == DAWN and not installed(DAWN):
        raise UserError(
            f"{flag('backend')} {name} is not installed: install it with \"pip install 'wgpu-lora[dawn]'\", or "
            f"choose {WGPU}."
        )


def backend(name: str | None = None) -> Backend:
    """A backend by name, by default the environment's (`WGPU_LORA_BACKEND`), else wgpu-native.

    Raises:
        UserError: there is no such backend, or it is not installed.
    """
    choice = name or os.environ.get(ENVIRONMENT) or AUTO
    check_backend(choice)
    return _load(WGPU if choice == AUTO else choice)


@cache
def _load(name: str) -> Backend:
    if name == DAWN:
        from wgpu_lora.gpu.backends.dawn import Dawn

        return Dawn()
    from wgpu_lora.gpu.backends.wgpu_native import WgpuNative

    return WgpuNative()
