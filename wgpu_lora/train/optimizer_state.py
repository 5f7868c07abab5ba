"""What an optimizer keeps between steps: tensors by page, and a slot's part of them in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from wgpu_lora.formats.peft import Matrices
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.tensor import NUMPY, Tensor, persistent
from wgpu_lora.gpu.values import widened
from wgpu_lora.models.lora import AdapterSet, Factor
from wgpu_lora.ops.optimizer import BLOCK
from wgpu_lora.train.optimizers.base import State

Arrays = dict[str, np.ndarray]
ANOTHER = "it holds the state of another optimizer"


class Kept(Protocol):
    """An optimizer's state of all slots. `pages`: the tensors of each page, in the order in which kernels bind them."""

    @property
    def pages(self) -> Sequence[tuple[Tensor, ...]]: ...

    def initialise(self, device: Device) -> None:
        """Upload tables that say where the state is."""

    def read(self, device: Device, slot: int) -> Arrays:
        """A slot's state by name, as it is stored in checkpoints."""

    def fault(self, slot: int, matrices: Matrices, stored: Mapping[str, np.ndarray]) -> str | None:
        """What is wrong with a slot's stored state, given its matrices; None if it can be loaded."""

    def write(self, device: Device, slot: int, stored: Mapping[str, np.ndarray]) -> None:
        """Upload a slot's state as `read` returned it; what is missing in `stored` becomes zero."""

    def fill(self, device: Device, rng: np.random.Generator) -> None:
        """Fill it with random values, as after some steps."""


@dataclass(frozen=True)
class Placed:
    """A slot's matrix: its factor's place in a page, its first block there, and its shape at the slot's own rank."""

    name: str  # module.A or module.B
    factor: Factor
    first: int
    shape: tuple[int, int]

    @property
    def blocks(self) -> int:
        return self.factor.blocks


def placed(adapters: AdapterSet, slot: int) -> Iterator[Placed]:
    """The matrices of a slot."""
    rank = adapters.specs[slot].rank  # of the slot; a module's own may be smaller
    for module in adapters.modules(slot):
        for which in "AB":
            factor = adapters.factors[module, which]
            rows, cols = factor.shape
            shape = (rank, cols) if which == "A" else (rows, rank)
            yield Placed(f"{module}.{which}", factor, (factor.offset + slot * factor.stride) // BLOCK, shape)


def padded(values: np.ndarray, shape: tuple[int, int], fill: int = 0) -> np.ndarray:
    """A matrix at the rank of all slots."""
    found = np.full(shape, fill, values.dtype)
    found[: values.shape[0], : values.shape[1]] = values
    return found


def wrong_values(name: str, values: np.ndarray, dtype: type, shape: tuple[int, ...], least: float | None) -> str | None:
    """What is wrong with an array of a checkpoint, if anything."""
    if values.dtype != dtype or values.shape != shape:
        return f"{name} is {values.dtype} {list(values.shape)}, expected {np.dtype(dtype)} {list(shape)}"
    numbers = widened(values)
    if not np.isfinite(numbers).all():
        return f"{name} has values that are not finite"
    if least is not None and (numbers < least).any():
        return f"{name} has values below {least:g}"
    return None


class Plain:
    """A tensor of one type for each `State` and page. State by parameter is stored in its matrix's shape at the slot's
    own rank, other state as [blocks, values]."""

    def __init__(self, adapters: AdapterSet, states: Sequence[State]):
        self.adapters, self.states = adapters, states
        self.pages = [
            tuple(
                persistent((table.size * state.values,), state.dtype, "optimizer", f"{state.name} {i}")
                for state in states
            )
            for i, table in enumerate(adapters.block_owners)
        ]

    def initialise(self, device: Device) -> None:
        pass

    def read(self, device: Device, slot: int) -> Arrays:
        found: Arrays = {}
        for at, state in enumerate(self.states):
            host = [device.read(page[at].storage.buffer).view(NUMPY[state.dtype]) for page in self.pages]
            for matrix in placed(self.adapters, slot):
                name, first = f"{matrix.name}.{state.name}", matrix.first * state.values
                if state.by_parameter:
                    (rows, cols), own = matrix.factor.shape, matrix.shape
                    whole = host[matrix.factor.page][first : first + rows * cols].reshape(rows, cols)
                    found[name] = whole[: own[0], : own[1]].copy()
                else:
                    values = host[matrix.factor.page][first : first + matrix.blocks * state.values]
                    found[name] = values.reshape(matrix.blocks, state.values).copy()
        return found

    def fault(self, slot: int, matrices: Matrices, stored: Mapping[str, np.ndarray]) -> str | None:
        expected = {
            f"{matrix.name}.{state.name}": (state, matrix.shape)
            if state.by_parameter
            else (state, (matrix.blocks, state.values))
            for state in self.states
            for matrix in placed(self.adapters, slot)
        }
        if set(stored) != set(expected):
            return ANOTHER
        for name, (state, shape) in expected.items():
            if wrong := wrong_values(name, stored[name], NUMPY[state.dtype], shape, state.least):
                return wrong
        return None

    def write(self, device: Device, slot: int, stored: Mapping[str, np.ndarray]) -> None:
        for at, state in enumerate(self.states):
            for matrix in placed(self.adapters, slot):
                values = stored.get(f"{matrix.name}.{state.name}")
                if values is None:
                    values = np.zeros(matrix.blocks * state.values, NUMPY[state.dtype])
                elif state.by_parameter:
                    values = padded(values, matrix.factor.shape)
                buffer = self.pages[matrix.factor.page][at].storage.buffer
                device.write(buffer, values, matrix.first * state.block_bytes)

    def fill(self, device: Device, rng: np.random.Generator) -> None:
        for at, state in enumerate(self.states):
            draw = rng.standard_normal if state.least is None else rng.random
            for page in self.pages:
                floats = state.dtype in ("f32", "bf16")
                values = draw(page[at].shape, np.float32) if floats else np.zeros(page[at].shape, np.float32)
                values = (values + (state.least or 0)).astype(np.float32)
                of_type = values.view(np.uint32) >> 16 if state.dtype == "bf16" else values
                device.write(page[at].storage.buffer, of_type.astype(NUMPY[state.dtype]))
