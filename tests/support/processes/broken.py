"""Drivers that get kernels wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import ShaderError
from wgpu_lora.gpu.kernel import Kernel
from wgpu_lora.gpu.tiling import Tiling

Break = Callable[..., None]


def breaking(monkeypatch: pytest.MonkeyPatch) -> Break:
    """A driver whose shaders of a kernel write nothing, or do not compile, in the tilings chosen by `matches`."""
    compute_pipeline = Kernel.compute_pipeline

    def breaks(name: str, matches: Callable[[Tiling], bool] = lambda _: True, compiles: bool = True) -> None:
        def compile(self: Kernel, device: Device, present: Any, constants: Any, tiling: Tiling) -> Any:
            if self.name != name or not matches(tiling):
                return compute_pipeline(self, device, present, constants, tiling)
            if not compiles:
                raise ShaderError(name, "register\n  allocation failed\n")
            text = self.source(present, constants, tiling)
            body = text.index("{", text.index("fn main("))
            text = text[: body + 1] + "if (true) { return; }" + text[body + 1 :]
            compiled = tuple(sorted(self.compiled_in(constants).items()))
            return device.compute_pipeline(("broken", name, present, compiled, tiling), lambda: text)

        monkeypatch.setattr(Kernel, "compute_pipeline", compile)

    return breaks
