"""Recording one brick: the product's own ops on synthetic tensors, forward and backward in programs of their own."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from wgpu_lora.bench.check import poison
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import NUMPY, Storage, Tensor, persistent
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.train.optimizers.base import State
from wgpu_lora.weights.base import Shared, Weight
from wgpu_lora.weights.registry import base_format

Fill = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def normal(scale: float = 1.0) -> Fill:
    return lambda rng, shape: scale * rng.standard_normal(shape, np.float32)


def words(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Random bits."""
    return rng.integers(0, 256, (*shape[:-1], 4 * shape[-1]), np.uint8)


def fixed(values: np.ndarray) -> Fill:
    return lambda rng, shape: values


def state_fill(state: State) -> Fill:
    """Values that an optimizer may have come to keep."""
    if state.dtype != "f32":
        return lambda rng, shape: np.zeros(shape, NUMPY[state.dtype])
    if state.least is None:
        return normal()
    least = np.float32(state.least)
    return lambda rng, shape: least + rng.random(shape, np.float32)


class KeptProgram(Program):
    """A program whose temporaries keep buffers of their own, so that others can read what it left in them."""

    def __init__(self, device: Device, name: str, temps: list[Tensor]):
        super().__init__(device, name)
        self._temps = temps

    def temp(self, shape: tuple[int, ...], dtype: str = "f32", name: str = "temp") -> Tensor:
        made = persistent(shape, dtype, "workspace", name)
        self._temps.append(made)
        return made


class Recording:
    """Inputs, a forward program and a backward program of ops that a brick records through `rec`."""

    def __init__(self, device: Device, compute_dtype: str = "f32"):
        self.device = device
        self.temps: list[Tensor] = []
        self.forward, self.backward = (KeptProgram(device, name, self.temps) for name in ("forward", "backward"))
        self.rec = Recorder(self.forward, training=True, compute_dtype=compute_dtype)
        self._fills: dict[Tensor, Fill] = {}
        self._weights: list[Weight] = []

    # -- what ops work on ------------------------------------------------------------------------------------------

    def input(
        self, shape: tuple[int, ...], fill: Fill | None = None, dtype: str = "f32", name: str = "input"
    ) -> Tensor:
        """A tensor that every `fresh` fills anew; of normal values where nothing else is said."""
        return self.adopt(persistent(shape, dtype, "workspace", name), fill or normal())

    def adopt(self, tensor: Tensor, fill: Fill) -> Tensor:
        """A tensor declared elsewhere, filled likewise."""
        self._fills[tensor] = fill
        return tensor

    def tracked(self, shape: tuple[int, ...], name: str = "x") -> Tensor:
        """An input whose gradient is wanted."""
        tensor = self.input(shape, name=name)
        self.rec.node(lambda: None, inputs=[], outputs=[tensor], trains=True)
        return tensor

    def weight(self, shape: tuple[int, int], base_dtype: str, name: str) -> Weight:
        """A frozen matrix [out, in] in a base format, of random contents."""
        weight = base_format(base_dtype).declare(shape, name, Shared(self.device.max_binding))
        self._weights.append(weight)
        return weight

    def record_backward(self, *outputs: Tensor) -> None:
        """Records the backward pass of everything so far, into `backward`, from random gradients of the outputs."""
        self.rec.program = self.backward
        for y in outputs:
            gradient = self.rec.new_gradient(y)
            self.temps.remove(gradient)
            self._fills[gradient] = normal()
        self.rec.backward()

    # -- on the device ---------------------------------------------------------------------------------------------

    def storages(self) -> set[Storage]:
        held = self.forward.persistent_storages() | self.backward.persistent_storages()
        return held.union((tensor.storage for tensor in self._fills), *(weight.storages() for weight in self._weights))

    def fresh(self, rng: np.random.Generator) -> None:
        """New random inputs, and NaN wherever a kernel is to write."""
        for tensor, fill in self._fills.items():
            values = fill(rng, tensor.shape)
            if tensor.dtype == "bf16" and values.dtype == np.float32:
                values = values.astype(ml_dtypes.bfloat16)
            elif values.dtype != np.uint8:
                values = values.astype(NUMPY[tensor.dtype])
            self.device.write(tensor.storage.buffer, values.reshape(-1).view(np.uint8)[: tensor.nbytes])
        for weight in self._weights:
            for tensor, values in weight.synthetic(rng):
                self.device.write(tensor.storage.buffer, values)
        for tensor in self.temps:
            if tensor.storage.buffer is not None:
                poison(self.device, tensor.storage.buffer)
