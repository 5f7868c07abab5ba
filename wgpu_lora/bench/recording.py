"""Recording one brick: the product's own ops on made-up tensors, forward and backward in programs of their own."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from wgpu_lora.bench.check import poison
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import NUMPY, Storage, Tensor, persistent
from wgpu_lora.ops.linear import Weight
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.weights.dense import DenseWeight
from wgpu_lora.weights.nf4 import NF4Weight
from wgpu_lora.weights.nf4_codes import DYNAMIC_CODE

Fill = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def normal(scale: float = 1.0) -> Fill:
    return lambda rng, shape: scale * rng.standard_normal(shape, np.float32)


def words(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Random bits."""
    return rng.integers(0, 256, (*shape[:-1], 4 * shape[-1]), np.uint8)


def fixed(values: np.ndarray) -> Fill:
    return lambda rng, shape: values


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

    def weight(self, shape: tuple[int, int], dtype: str, name: str) -> Weight:
        """A frozen matrix of random codes (nf4) or values of deviation 0.02."""
        if dtype != "nf4":
            dense = DenseWeight.declare(shape, dtype, name, self.device.max_binding)
            for part in dense.parts:
                self._fills[part] = normal(0.02)
            return dense
        packed = NF4Weight.declare(shape, name, persistent((256,), "f32", "base", "dynamic code"))
        absmax_codes, nested, dynamic = packed.constants
        self._fills[dynamic] = fixed(DYNAMIC_CODE)
        self._fills[packed.codes] = self._fills[absmax_codes] = words
        self._fills[nested] = lambda rng, shape: (0.01 + 0.01 * rng.random(shape)).astype(np.float32)
        return packed

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
        return held | {tensor.storage for tensor in self._fills}

    def fresh(self, rng: np.random.Generator) -> None:
        """New random inputs, and NaN wherever a kernel is to write."""
        for tensor, fill in self._fills.items():
            values = fill(rng, tensor.shape)
            if tensor.dtype == "bf16" and values.dtype == np.float32:
                values = values.astype(ml_dtypes.bfloat16)
            elif values.dtype != np.uint8:
                values = values.astype(NUMPY[tensor.dtype])
            self.device.write(tensor.storage.buffer, values.reshape(-1).view(np.uint8)[: tensor.nbytes])
        for tensor in self.temps:
            if tensor.storage.buffer is not None:
                poison(self.device, tensor.storage.buffer)
