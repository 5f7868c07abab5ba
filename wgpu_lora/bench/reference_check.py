"""Correctness of a program: every kind of dispatch is compared with its kernel's float64 reference."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.dispatch import Dispatch
from wgpu_lora.gpu.first_run import errors, read_tensors
from wgpu_lora.gpu.program import Program

POISON_BYTES = 16 << 20


@dataclass
class ReferenceErrors:
    """The largest normalised mean squared error and its kernel.

    outputs: number of outputs compared. in_part: kernels of which only a part was compared (see gpu.reference_values).
    """

    nmse: float = 0.0
    kernel: str = ""
    outputs: int = 0
    in_part: tuple[str, ...] = ()

    def add(self, nmse: float, kernel: str, part: bool) -> None:
        self.outputs += 1
        if not self.kernel or not nmse <= self.nmse:  # a NaN is the worst
            self.nmse, self.kernel = nmse, kernel
        if part and kernel not in self.in_part:
            self.in_part += (kernel,)


def check(
    program: Program, checked: ReferenceErrors | None = None, kernels: Container[str] | None = None
) -> ReferenceErrors:
    """Run a built program once, dispatch by dispatch, and compare the first of each kind with its reference.

    A reference gets the values that the device holds: inputs, and outputs of earlier dispatches. If temporaries are
    filled with NaN beforehand, outputs that were never written are found.

    kernels: names of the kernels to compare; all by default.
    """
    checked = checked or ReferenceErrors()
    keys: set[Any] = set()
    for i, step in enumerate(program.dispatches):
        kind = _kind(step)
        if kind in keys or (kernels is not None and step.kernel.name not in kernels):
            program.submit(i, i + 1)
            continue
        keys.add(kind)
        before = read_tensors(program.device, step.present, step.tensors)
        program.submit(i, i + 1)
        after = read_tensors(program.device, step.present, step.tensors)
        for error, in_part in errors(step.kernel, step.constants, before, after):
            checked.add(error, step.kernel.name, in_part)
    return checked


def fill_with_nan(device: Device, buffer: Any) -> None:
    """Fill a buffer with NaN."""
    for start in range(0, buffer.size, POISON_BYTES):
        device.write(buffer, np.full(min(POISON_BYTES, buffer.size - start) // 4, np.nan, np.float32), start)


def _kind(step: Dispatch) -> Any:
    constants = {n: bool(v) if n in step.kernel.offsets else v for n, v in step.constants.items()}
    tensors = tuple((t.shape, t.dtype) for t in step.tensors)
    return step.kernel.name, step.present, tuple(sorted(constants.items())), tensors
