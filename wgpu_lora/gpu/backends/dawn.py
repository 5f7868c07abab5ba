"""Dawn, the WebGPU of Chromium, through wgpudawn, which has wgpu-py's API."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import wgpudawn
from wgpudawn import _lib
from wgpudawn.backends.dawn import extras

from wgpu_lora.gpu.backends import DAWN, SUBGROUP, MatrixConfiguration, tint_text

SUBGROUPS, MATRICES = "subgroups", "chromium-experimental-subgroup-matrix"  # Dawn's spellings
SIZE_CONTROL = "subgroup-size-control"
MATRIX_HEAD = """enable chromium_experimental_subgroup_matrix;
diagnostic(off, chromium.subgroup_matrix_uniformity);
"""


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Discard what the library itself writes to stderr: warnings about limits of software drivers that are listed."""
    sys.stderr.flush()
    try:
        before = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(devnull)
        os.close(before)


class Dawn:
    """See `Backend`. Subgroup matrices are experimental, so they are allowed before the first device is listed."""

    name, api = DAWN, wgpudawn

    def __init__(self) -> None:
        extras.set_instance_extras(enable_toggles=["allow_unsafe_apis"])

    def versions(self) -> dict[str, str]:
        return {"wgpudawn": version("wgpudawn")}

    def library(self) -> Path:
        return next(Path(_lib.__path__[0]).glob("_wgpu_dawn*"))

    def adapters(self) -> list[Any]:
        with _quiet_stderr():
            adapters: list[Any] = wgpudawn.gpu.enumerate_adapters_sync()
        return adapters

    def features(self, adapter: Any) -> frozenset[str]:
        return frozenset(SUBGROUP if name == SUBGROUPS else name for name in adapter.features)

    def matrices(self, adapter: Any) -> tuple[MatrixConfiguration, ...]:
        if SIZE_CONTROL not in adapter.features:  # a kernel is compiled for subgroups of one size
            return ()
        configurations = extras.get_adapter_properties(adapter).get("subgroup_matrix_configs", ())
        return tuple(
            MatrixConfiguration(
                *(config["m"], config["n"], config["k"]),
                *(config["component_type"], config["result_component_type"]),
                max(config["min_subgroup_size"], min(32, config["max_subgroup_size"])),
            )
            for config in configurations
        )

    def open(self, adapter: Any, features: list[str], limits: dict[str, int], checked: bool) -> Any:
        required = [SUBGROUPS if name == SUBGROUP else name for name in features]
        if SUBGROUP in features:
            required += [name for name in (MATRICES, SIZE_CONTROL) if name in adapter.features]
        toggles = [] if checked else ["disable_robustness"]  # as trusted modules of wgpu-native
        return extras.request_device_sync(
            adapter, required_features=required, required_limits=limits, enable_toggles=toggles
        )

    def module(self, device: Any, code: str, label: str, checked: bool) -> Any:
        if "subgroup_matrix" in code:
            size = code.partition("@subgroup_size")[1] and "enable subgroup_size_control;\n"
            code = f"enable f16;\nenable subgroups;\n{size}{MATRIX_HEAD}{code}"
        else:
            code = tint_text(code)
        return device.create_shader_module(code=code, label=label)

    def wait(self, device: Any) -> None:
        device.queue.on_submitted_work_done_sync()

    def timestamp_period(self, device: Any) -> float:
        return 1e-9
