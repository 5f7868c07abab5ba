"""Compares what a dispatch computed with its kernel's float64 reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.kernel import Kernel
from wgpu_lora.gpu.tensor import NUMPY, Tensor
from wgpu_lora.gpu.tunable import Arrays, Constants
from wgpu_lora.gpu.values import nmse, widened


def read_tensors(device: Device, present: Sequence[str], tensors: Sequence[Tensor]) -> Arrays:
    """The values of a dispatch's tensors as stored."""
    found = {}
    for name, tensor in zip(present, tensors, strict=True):
        buffer, offset, _ = tensor.binding()
        values = device.read(buffer, tensor.nbytes, offset).view(NUMPY[tensor.dtype])
        found[name] = values.reshape(tensor.shape).copy()
    return found


def differences(kernel: Kernel, constants: Constants, before: Arrays, after: Arrays) -> Iterator[tuple[Any, Any, bool]]:
    """(values, reference, whether they are a part) of each output, from the tensors before and after a dispatch.

    Large calls are compared in part (see gpu.part), packed codes by code. Kernels without a reference give nothing.

    Raises:
        Exception: the reference does not take these tensors; a note names the kernel.
        TypeError: it does not return an array for each output.
    """
    whole = after
    part, part_after = (kernel.part(arrays, constants) if kernel.part else None for arrays in (before, after))
    if part and part_after:
        (before, constants), (after, _) = part, part_after
    given = {name: widened(before[name]) if name in before else None for name in kernel.bindings}
    try:
        with np.errstate(all="ignore"):  # rows that are not written yet
            result = kernel(**given, **constants)
    except Exception as error:
        error.add_note(f"in the float64 reference of {kernel.name}, with {constants}")
        raise
    if result is None:
        return
    outputs, results = [name for name in kernel.outputs if name in before], result
    if not isinstance(results, tuple):
        results = (results,)
    if len(results) != len(outputs):
        raise TypeError(f"the reference of {kernel.name} returns {len(results)} arrays, but its outputs are {outputs}")
    for name, want in zip(outputs, results, strict=True):
        got, values = widened(after[name]).reshape(-1), np.asarray(want).reshape(-1)
        in_part = got.size < whole[name].size
        if got.dtype == np.uint32:  # packed codes
            got, values = _nibbles(got), _nibbles(values)
        yield got, values, in_part


def errors(kernel: Kernel, constants: Constants, before: Arrays, after: Arrays) -> Iterator[tuple[float, bool]]:
    """(normalised mean squared error, whether it is of a part) of each output. NaN: there is nothing to compare
    with, since no value of the reference is finite."""
    for got, want, in_part in differences(kernel, constants, before, after):
        yield nmse(got, want) if np.isfinite(want).any() or not want.size else float("nan"), in_part


def _nibbles(words: np.ndarray) -> np.ndarray:
    return (words.astype(np.uint32)[:, None] >> 4 * np.arange(8, dtype=np.uint32)) & 15
