"""A call of a kernel on tensors, as programs record it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from wgpu_lora.gpu.kernel import Grid, Kernel
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.gpu.tiling import Capabilities, Tiling


@dataclass(frozen=True)
class Dispatch:
    kernel: Kernel
    tensors: tuple[Tensor, ...]
    present: tuple[str, ...]
    constants: dict[str, Any]
    tiling: Tiling
    groups: Grid
    fixed: bool = False  # `build` may not choose another tiling
    decoding: bool = False  # see `Capabilities`

    @cached_property
    def dims(self) -> tuple[int, ...]:
        return tuple(self.constants[name] for name in self.kernel.dims)

    @property
    def shader(self) -> tuple[Any, ...]:
        """What its compute pipeline depends on; calls whose offsets differ are alike (`gpu.kernel.Offset`)."""
        return self.kernel.name, self.present, self.alike, self.tiling

    @cached_property
    def alike(self) -> tuple[tuple[str, Any], ...]:
        compiled, offsets = self.kernel.compiled_in(self.constants), self.kernel.offsets
        return tuple(sorted((name, bool(value) if name in offsets else value) for name, value in compiled.items()))

    def tilings(self, capabilities: Capabilities) -> Sequence[Tiling]:
        """The tilings that can run it on a device, the default first."""
        return self.kernel.tilings(replace(capabilities, decoding=self.decoding), self.constants)

    def tiled(self, tiling: Tiling) -> Dispatch:
        return replace(self, tiling=tiling, groups=self.kernel.groups(self.constants, tiling))
