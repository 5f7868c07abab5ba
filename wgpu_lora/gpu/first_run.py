"""The first run of a program, in which kernels whose results have not been checked on this device are checked.

Their inputs are the program's own, so no synthetic ones are needed and nothing is computed twice. Where a kernel is
wrong in a tiling, the others are tried on the same values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from wgpu_lora.gpu import reference_values
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import ShaderError
from wgpu_lora.gpu.dispatch import Dispatch
from wgpu_lora.gpu.kernel import Kernel
from wgpu_lora.gpu.reference_values import as_float64, nmse
from wgpu_lora.gpu.tensor import NUMPY, Tensor
from wgpu_lora.gpu.tiling import Arrays, Constants, Tiling
from wgpu_lora.gpu.verdicts import Verdicts, verdicts_of

NMSE = 1e-6  # limit of an error; of a wrong kernel it is around 1
ROUNDED = 1e-6  # error relative to the largest value of a call that rounding may leave where terms cancel out
PARTLY = 4  # times as many values are read where only a part is compared
CODES = 1e-2  # the same for packed codes, of which values on a threshold may take either
SMALLEST, LARGEST = 1e-15, 1e15  # root mean square of outputs, and size of values, that f32 computes with


class Runnable(Protocol):
    """A built program. retile: uses another tiling in a dispatch and all others of its compute pipeline."""

    device: Device
    dispatches: list[Dispatch]

    def submit(self, start: int, stop: int) -> None: ...

    def submit_in_pieces(self, start: int, stop: int) -> None: ...

    def retile(self, index: int, tiling: Tiling) -> None: ...


def unchecked(program: Runnable) -> list[int]:
    """The dispatches to check in the first run: the first of each compute pipeline without a verdict."""
    verdicts, result = verdicts_of(program.device), dict[Any, int]()
    if not verdicts.enabled:
        return []
    for index, step in enumerate(program.dispatches):
        checkable = not step.kernel.tuning and not step.fixed and _affordable(step)
        if checkable and step.shader not in result and not verdicts.of(step, step.tiling):
            result[step.shader] = index
    return list(result.values())


def run_checked(program: Runnable, indices: Iterable[int], count: int) -> None:
    """Runs all `count` dispatches once and checks those at `indices`, ascending.

    Raises:
        WrongResults: a kernel is wrong in all tilings.
    """
    verdicts, start = verdicts_of(program.device), 0
    try:
        for index in indices:
            program.submit_in_pieces(start, index)
            _check(program, index, verdicts)
            start = index + 1
    finally:
        verdicts.save()
    program.submit_in_pieces(start, count)


def _check(program: Runnable, index: int, verdicts: Verdicts) -> None:
    device, step = program.device, program.dispatches[index]
    kernel = step.kernel
    tilings = step.tilings(device.capabilities)
    before = read_tensors(device, step.present, step.tensors)
    for tiling in [step.tiling, *(candidate for candidate in tilings if candidate != step.tiling)]:
        verdict = verdicts.of(step, tiling)
        if verdict and not verdict.right:
            continue
        if tiling != step.tiling:
            _restore(device, step, before)
            try:
                program.retile(index, tiling)
            except ShaderError as error:
                verdicts.settle(step, tiling, None, NMSE, error.reason)
                continue
        program.submit(index, index + 1)
        worst = _worst(kernel, step.constants, before, read_tensors(device, step.present, step.tensors))
        if worst is None:  # these values show nothing
            return
        if verdicts.settle(step, tiling, *worst).right:
            return
    verdicts.usable(step)  # raises: there is none


def _worst(kernel: Kernel, constants: Constants, before: Arrays, after: Arrays) -> tuple[float, float] | None:
    """The largest error relative to its limit, and the limit; None if the values show nothing.

    That is where f32 cannot compute with them, the terms of outputs cancel out, a kernel that writes nothing or zeros
    would be right, too, or there is no reference.
    """
    inputs = [array for name, array in before.items() if kernel.bindings[name] != "out"]
    if any(_extreme(array) for array in inputs):
        return None
    result, names = [], [name for name in kernel.outputs if name in before]
    outputs = list(differences(kernel, constants, before, after))
    largest = max(map(_largest, (*inputs, *(want for _, want, _ in outputs))), default=0.0)
    if not any(_shows(want, before[name]) for name, (_, want, _) in zip(names, outputs, strict=False)):
        return None  # without a reference, there are no outputs
    for output, want, _ in outputs:
        output = output[: want.size]
        finite = want[np.isfinite(want)].astype(np.float64)
        if output.dtype == np.float64 and 0 < _rms(finite) < SMALLEST:
            return None
        error, limit = nmse(output, want), CODES if output.dtype.kind == "u" else NMSE
        if limit < error < np.inf and _rms(output.astype(np.float64) - want) < ROUNDED * largest:
            return None
        result.append((error, limit))
    return max(result, key=lambda pair: np.nan_to_num(pair[0], nan=np.inf) / pair[1])


def _shows(want: np.ndarray, before: np.ndarray) -> bool:
    old = as_float64(before).reshape(-1)
    return bool(want.any()) and not (old.size == want.size and np.array_equal(old, want, equal_nan=True))


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array[np.isfinite(array)]).max(initial=0)) if array.dtype.kind == "f" else 0.0


def _extreme(array: np.ndarray) -> bool:
    if array.dtype != np.float32:
        return False
    return bool(np.abs(array[np.isfinite(array)]).max(initial=0) > LARGEST) or not np.isfinite(array).all()


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt((values**2).mean())) if values.size else 0.0


def _restore(device: Device, step: Dispatch, before: Arrays) -> None:
    for name, tensor in zip(step.present, step.tensors, strict=True):
        if name in step.kernel.outputs:
            buffer, offset, _ = tensor.binding()
            device.write(buffer, before[name], offset)


def _affordable(step: Dispatch) -> bool:
    """Whether a reference takes little time, and reading the tensors little memory."""
    return max(tensor.size for tensor in step.tensors) <= reference_values.VALUES * (PARTLY if step.kernel.part else 1)


def read_tensors(device: Device, present: Sequence[str], tensors: Sequence[Tensor]) -> Arrays:
    """The values of a dispatch's tensors as stored."""
    result = {}
    for name, tensor in zip(present, tensors, strict=True):
        buffer, offset, _ = tensor.binding()
        values = device.read(buffer, tensor.nbytes, offset).view(NUMPY[tensor.dtype])
        result[name] = values.reshape(tensor.shape).copy()
    return result


def differences(kernel: Kernel, constants: Constants, before: Arrays, after: Arrays) -> Iterator[tuple[Any, Any, bool]]:
    """(values, reference, whether they are a part) of each output, from the tensors before and after a dispatch.

    Large calls are compared in part (see gpu.reference_values), packed codes by code. Kernels without a reference
    give nothing.

    Raises:
        Exception: the reference does not take these tensors; a note names the kernel.
        TypeError: it does not return an array for each output.
    """
    whole = after
    part, part_after = (kernel.part(arrays, constants) if kernel.part else None for arrays in (before, after))
    if part and part_after:
        (before, constants), (after, _) = part, part_after
    arguments = {name: as_float64(before[name]) if name in before else None for name in kernel.bindings}
    try:
        with np.errstate(all="ignore"):  # rows that are not written yet
            result = kernel(**arguments, **constants)
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
        output, values = as_float64(after[name]).reshape(-1), np.asarray(want).reshape(-1)
        in_part = output.size < whole[name].size
        if output.dtype == np.uint32:  # packed codes
            output, values = _nibbles(output), _nibbles(values)
        yield output, values, in_part


def errors(kernel: Kernel, constants: Constants, before: Arrays, after: Arrays) -> Iterator[tuple[float, bool]]:
    """(normalised mean squared error, whether it is of a part) of each output. NaN: there is nothing to compare
    with, since no value of the reference is finite."""
    for output, want, in_part in differences(kernel, constants, before, after):
        yield nmse(output, want) if np.isfinite(want).any() or not want.size else float("nan"), in_part


def _nibbles(words: np.ndarray) -> np.ndarray:
    return (words.astype(np.uint32)[:, None] >> 4 * np.arange(8, dtype=np.uint32)) & 15
