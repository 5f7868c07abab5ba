"""A program of one product, for tests of tilings."""

from __future__ import annotations

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import Tensor, persistent
from wgpu_lora.ops.matmul import matmul_nt

SHAPE = {"m": 12, "n": 20, "k": 16}


def product(device: Device, **shape: int) -> tuple[Program, Tensor]:
    """A program of one product, and its result."""
    size = {**SHAPE, **shape}
    a = persistent((size["m"], size["k"]), "f32", "workspace", "a")
    b = persistent((size["n"], size["k"]), "f32", "workspace", "b")
    y = persistent((size["m"], size["n"]), "f32", "workspace", "y")
    program = Program(device)
    program.dispatch(matmul_nt, a, b, y, **size)
    return program, y
