"""Correctness of a program: every kind of dispatch is compared with its kernel's float64 reference."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Dispatch, Program
from wgpu_lora.gpu.tensor import NUMPY
from wgpu_lora.gpu.tunable import Arrays
from wgpu_lora.gpu.values import nmse, widened

POISON_BYTES = 16 << 20


@dataclass
class Checked:
    """The largest normalised mean squared error and its kernel.

    outputs: number of outputs compared. in_part: kernels of which only a part was compared (see gpu.part).
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


def check(program: Program, found: Checked | None = None, kernels: Container[str] | None = None) -> Checked:
    """Run a built program once, dispatch by dispatch, and compare the first of each kind with its reference.

    A reference gets the values that the device holds: inputs, and outputs of earlier dispatches. If temporaries are
    filled with NaN beforehand, outputs that were never written are found.

    kernels: names of the kernels to compare; all by default.
    """
    found = found or Checked()
    seen: set[Any] = set()
    for i, step in enumerate(program.dispatches):
        kind = _kind(step)
        if kind in seen or (kernels is not None and step.kernel.name not in kernels):
            program.submit(i, i + 1)
            continue
        seen.add(kind)
        before = _read(program.device, step)
        program.submit(i, i + 1)
        _compare(step, before, _read(program.device, step), found)
    return found


def poison(device: Device, buffer: Any) -> None:
    """Fill a buffer with NaN."""
    for start in range(0, buffer.size, POISON_BYTES):
        device.write(buffer, np.full(min(POISON_BYTES, buffer.size - start) // 4, np.nan, np.float32), start)


def _kind(step: Dispatch) -> Any:
    constants = {n: bool(v) if n in step.kernel.places else v for n, v in step.constants.items()}
    tensors = tuple((t.shape, t.dtype) for t in step.tensors)
    return step.kernel.name, step.present, tuple(sorted(constants.items())), tensors


def _read(device: Device, step: Dispatch) -> Arrays:
    """The values of a dispatch's tensors as stored."""
    found = {}
    for name, tensor in zip(step.present, step.tensors, strict=True):
        buffer, offset, _ = tensor.binding()
        values = device.read(buffer, tensor.nbytes, offset).view(NUMPY[tensor.dtype])
        found[name] = values.reshape(tensor.shape).copy()
    return found


def _compare(step: Dispatch, before: Arrays, after: Arrays, found: Checked) -> None:
    kernel, constants, whole = step.kernel, step.constants, after
    part, part_after = (kernel.part(arrays, constants) if kernel.part else None for arrays in (before, after))
    if part and part_after:
        (before, constants), (after, _) = part, part_after
    given = {name: widened(before[name]) if name in before else None for name in kernel.bindings}
    with np.errstate(all="ignore"):  # rows that are not written yet
        result = kernel(**given, **constants)
    outputs = [name for name in kernel.outputs if name in before]
    for name, want in zip(outputs, result if isinstance(result, tuple) else (result,), strict=True):
        got, values = widened(after[name]).reshape(-1), np.asarray(want).reshape(-1)
        in_part = got.size < whole[name].size
        if got.dtype == np.uint32:  # packed codes
            got, values = _nibbles(got), _nibbles(values)
        found.add(nmse(got, values), kernel.name, in_part)


def _nibbles(words: np.ndarray) -> np.ndarray:
    return (words.astype(np.uint32)[:, None] >> 4 * np.arange(8, dtype=np.uint32)) & 15
