"""Runs a recorded program in float64, each dispatch by the reference of its kernel."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import Storage, Tensor


def run_exactly(program: Program, inputs: Mapping[Tensor, np.ndarray]) -> dict[Storage, np.ndarray]:
    """The values of all storages at the end, flat float64. Those that are not given begin as NaN."""
    memory: dict[Storage, np.ndarray] = {}

    def view(tensor: Tensor) -> np.ndarray:
        """A tensor's values, as an array that shares the storage's."""
        if tensor.storage not in memory:
            memory[tensor.storage] = np.full(tensor.storage.nbytes // 4, np.nan)
        first = tensor.byte_offset // 4
        return memory[tensor.storage][first : first + tensor.size].reshape(tensor.shape)

    for tensor, values in inputs.items():
        if tensor.dtype == "u32":
            memory[tensor.storage] = np.asarray(values, np.uint32).reshape(-1)
        else:
            view(tensor)[:] = values
    for step in program.dispatches:
        tensors = dict(zip(step.present, step.tensors, strict=True))
        with np.errstate(invalid="ignore"):
            results = step.kernel(
                **{n: view(tensors[n]) if n in tensors else None for n in step.kernel.bindings}, **step.constants
            )
        outputs = [tensors[n] for n in step.kernel.outputs if n in tensors]
        for tensor, result in zip(outputs, results if isinstance(results, tuple) else (results,), strict=True):
            view(tensor)[:] = np.asarray(result).reshape(tensor.shape)
    return memory
