"""What an optimizer keeps between steps: tensors by page, and a slot's part of them in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.tensor import NUMPY, Tensor, persistent
from wgpu_lora.gpu.tunable import Arrays
from wgpu_lora.gpu.values import widened
from wgpu_lora.models.parameters import ParameterSet, Place
from wgpu_lora.ops.optimizer import BLOCK
from wgpu_lora.train.optimizers.base import State

ANOTHER = "it holds the state of another optimizer"


class Kept(Protocol):
    """An optimizer's state of all slots. `pages`: the tensors of each page, in the order in which kernels bind them."""

    @property
    def pages(self) -> Sequence[tuple[Tensor, ...]]: ...

    def initialise(self, device: Device) -> None:
        """Upload tables that say where the state is."""

    def read(self, device: Device, slot: int) -> Arrays:
        """A slot's state by name, as it is stored in checkpoints."""

    def fault(self, slot: int, stored: Mapping[str, np.ndarray]) -> str | None:
        """What is wrong with a slot's stored state; None if it can be loaded."""

    def write(self, device: Device, slot: int, stored: Mapping[str, np.ndarray]) -> None:
        """Upload a slot's state as `read` returned it; what is missing in `stored` becomes zero."""

    def fill(self, device: Device, rng: np.random.Generator) -> None:
        """Fill it with random values, as after some steps."""


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


def laid_out(place: Place, values: np.ndarray, fill: int = 0) -> np.ndarray:
    """An array in its padded shape."""
    found, matrix = np.full(place.shape, fill, values.dtype), np.atleast_2d(values)
    found[: matrix.shape[0], : matrix.shape[1]] = matrix
    return found


class Plain:
    """A tensor of one type for each `State` and page. State by parameter is stored in its array's shape, other state as
    [blocks, values]."""

    def __init__(self, trained: ParameterSet, states: Sequence[State]):
        self.trained, self.states = trained, states
        self.pages: Sequence[tuple[Tensor, ...]] = [
            tuple(
                persistent((table.size * state.values,), state.dtype, "optimizer", f"{state.name} {i}")
                for state in states
            )
            for i, table in enumerate(trained.block_owners)
        ]

    def initialise(self, device: Device) -> None:
        pass

    def _places(self, state: State, slot: int) -> dict[str, Place]:
        """The places of a slot's arrays, by the names of their state."""
        return {f"{name}.{state.name}": place for name, place in self.trained.places(slot).items()}

    def read(self, device: Device, slot: int) -> Arrays:
        found: Arrays = {}
        for at, state in enumerate(self.states):
            host = [device.read(page[at].storage.buffer).view(NUMPY[state.dtype]) for page in self.pages]
            for name, place in self._places(state, slot).items():
                if state.by_parameter:
                    found[name] = place.cropped(host[place.page])
                    continue
                first = place.first // BLOCK * state.values
                values = host[place.page][first : first + place.blocks * state.values]
                found[name] = values.reshape(place.blocks, state.values).copy()
        return found

    def fault(self, slot: int, stored: Mapping[str, np.ndarray]) -> str | None:
        expected = {
            name: (state, place.own if state.by_parameter else (place.blocks, state.values))
            for state in self.states
            for name, place in self._places(state, slot).items()
        }
        if set(stored) != set(expected):
            return ANOTHER
        for name, (state, shape) in expected.items():
            if wrong := wrong_values(name, stored[name], NUMPY[state.dtype], shape, state.least):
                return wrong
        return None

    def write(self, device: Device, slot: int, stored: Mapping[str, np.ndarray]) -> None:
        for at, state in enumerate(self.states):
            pages = [page[at] for page in self.pages]
            for name, place in self._places(state, slot).items():
                values = stored.get(name)
                if values is None:
                    values = np.zeros(place.blocks * state.values, NUMPY[state.dtype])
                elif state.by_parameter:
                    values = laid_out(place, values)
                device.write(pages[place.page].storage.buffer, values, place.first // BLOCK * state.block_bytes)

    def fill(self, device: Device, rng: np.random.Generator) -> None:
        for at, state in enumerate(self.states):
            draw = rng.standard_normal if state.least is None else rng.random
            for page in self.pages:
                floats = state.dtype in ("f32", "bf16")
                values = draw(page[at].shape, np.float32) if floats else np.zeros(page[at].shape, np.float32)
                values = (values + (state.least or 0)).astype(np.float32)
                bits = values.view(np.uint32) >> 16 if state.dtype == "bf16" else values
                device.write(page[at].storage.buffer, bits.astype(NUMPY[state.dtype]))
