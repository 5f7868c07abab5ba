"""The compute pipelines of one layer of a named shape, each once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from scripts.gpu_compilers.steps import steps_of
from scripts.gpu_compilers.wanted import Wanted
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.dispatch import Dispatch
from wgpu_lora.gpu.kernel import Kernel
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tiling import Tiling
from wgpu_lora.models.blocks.transformer_block import Transformer
from wgpu_lora.models.published_shapes import shape_config

HEADS_OF = "llama-3.2-1b"  # whose attention is recorded with other sizes of heads


@dataclass
class Call:
    """A compute pipeline, and what uses it. default: whether it is used where nothing was tuned."""

    kernel: Kernel
    present: tuple[str, ...]
    constants: dict[str, Any]
    tiling: Tiling
    default: bool
    used_by: dict[str, list[str]] = field(default_factory=dict)  # shape -> of training, distillation, prefill and so on

    def to_json(self) -> dict[str, Any]:
        compiled_in = self.kernel.compiled_in(self.constants)
        return {
            "kernel": self.kernel.name,
            "constants": {name: value for name, value in compiled_in.items() if not isinstance(value, float)},
            "bindings": list(self.present),
            "tiling": self.tiling.to_json(),
            "default": self.default,
            "used_by": self.used_by,
        }


def calls(wanted: Wanted, device: Device) -> list[Call]:
    """All different compute pipelines, each once. Nothing is allocated on the device."""
    found: dict[Any, Call] = {}
    for shape, step, program in _programs(wanted, device):
        for dispatch in program.dispatches:
            for tiling in _tilings(dispatch, device, wanted):
                compiled_in = dispatch.kernel.compiled_in(dispatch.constants)
                key = dispatch.kernel.name, dispatch.present, tuple(sorted(compiled_in.items())), tiling
                default = tiling == dispatch.tiling
                of = dispatch.kernel, dispatch.present, dispatch.constants, tiling, default
                call = found.setdefault(key, Call(*of))
                call.default = call.default or default
                steps = call.used_by.setdefault(shape, [])
                if step not in steps:
                    steps.append(step)
    return list(found.values())


def _tilings(dispatch: Dispatch, device: Device, wanted: Wanted) -> list[Tiling]:
    kernel = dispatch.kernel
    if wanted.kernels and not any(part in kernel.name for part in wanted.kernels):
        return []
    offered: Sequence[Tiling] = [dispatch.tiling]
    if kernel.tuning and not dispatch.fixed:
        if wanted.candidates:
            offered = kernel.tilings(device.capabilities, dispatch.constants)
        if wanted.tiling:
            offered = [*offered, Tiling.from_json(wanted.tiling)]
    return list(offered)


def _programs(wanted: Wanted, device: Device) -> Iterator[tuple[str, str, Program]]:
    for shape in wanted.shapes:
        for step, program in steps_of(shape_config(shape, 1), wanted, device):
            yield shape, step, program
    for dim in wanted.head_dims:
        config = shape_config(HEADS_OF, 1)
        assert isinstance(config, Transformer)
        config = replace(config, head_dim=dim)
        for step, program in steps_of(config, wanted, device):
            program.dispatches = [one for one in program.dispatches if one.kernel.name.startswith("attention_")]
            yield f"head_dim {dim}", step, program
