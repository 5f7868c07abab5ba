"""The interface of optimizers; what they share is in train/session/optimizer_update.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.reference_values import as_float64, select_blocks
from wgpu_lora.gpu.struct import struct_columns, struct_fields
from wgpu_lora.gpu.tensor import ITEM_BYTES, NUMPY, Tensor, persistent
from wgpu_lora.gpu.tiling import Arrays
from wgpu_lora.models.parameters import PageRegion, ParameterSet
from wgpu_lora.ops.gradient_norm import BLOCK, MAX_PARAMETER, NO_OWNER

EIGHT_BIT = "8bit"  # codes of the dynamic map, with a scale per QUANT_BLOCK values (eight_bit.py)
QUANT_BLOCK = 256


@dataclass(frozen=True)
class State:
    """A tensor that an optimizer keeps between steps, zero at first: `values` of `dtype` per BLOCK parameters.

    dtype: of the device's tensors, or EIGHT_BIT. minimum: the smallest value that is valid in a checkpoint; 8-bit codes
        have no sign if it is 0.
    """

    name: str
    dtype: str = "f32"
    values: int = BLOCK
    minimum: float | None = None

    def __post_init__(self) -> None:
        assert self.dtype == EIGHT_BIT or self.block_bytes % 4 == 0, "a slot's part must begin at a whole word"

    @property
    def by_parameter(self) -> bool:
        """Whether there is one float per parameter; checkpoints then store it in the matrix's shape."""
        return self.dtype in ("f32", "bf16") and self.values == BLOCK

    @property
    def block_bytes(self) -> int:
        if self.dtype == EIGHT_BIT:
            return self.values + self.values // QUANT_BLOCK * 4
        return self.values * ITEM_BYTES[self.dtype]

    @property
    def bytes_per_parameter(self) -> float:
        return self.block_bytes / BLOCK


@dataclass(frozen=True)
class Page:
    """A page of all slots' parameters, `blocks` of BLOCK values, and the tensors of its update.

    state: as `OptimizerState.pages` has them. block_owners u32 [blocks]: 2 * slot, + 1 unless it is of
    an A, or NO_OWNER. hyper: a Hyper per owner. report f32 [slots, 4]: (norm, clipping factor, 1 if the slot may be
    updated, loss). optimizer_state: of the state_class. scratch: what the check has recorded for the update.
    """

    blocks: int
    params: Tensor
    grads: Tensor
    state: tuple[Tensor, ...]
    block_owners: Tensor
    hyper: Tensor
    report: Tensor
    optimizer_state: Any
    scratch: list[Tensor] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The number of values."""
        return self.blocks * BLOCK

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in the order in which kernels usually bind them."""
        return (self.params, self.grads, *self.state, self.block_owners, self.hyper, self.report)


class UpdateRule(Protocol):
    """An update rule: a frozen dataclass whose fields are the training options that it reads, and its own
    (`own_option`).

    state: may depend on these. state_class: how it is stored on the device and in checkpoints.
    Hyper: the struct that its kernels read for each owner, a dataclass of F32 fields (see gpu.struct).
    """

    @property
    def state(self) -> tuple[State, ...]: ...

    state_class: ClassVar[Any]
    Hyper: ClassVar[type]

    def hyper(self, step: int, learning_rate: float) -> Any:
        """An owner's Hyper for its 1-based `step`."""

    def record_check(self, program: Program, page: Page, diverged: Tensor) -> None:
        """Record a check that writes 1 into diverged f32 [blocks] if the update would make a parameter of the block
        larger than MAX_PARAMETER or any value non-finite, else 0; only slots that may be updated matter."""

    def record_update(self, program: Program, page: Page) -> None:
        """Record the update of the slots that may be updated; it zeroes the gradients of all slots."""


# (Hyper by value, parameters, gradient, state...) -> new (parameters, state...)
Moved = Callable[..., tuple[Any, ...]]
BF16_MAX = 3.3895313892515355e38


def slot_slice(*states: str) -> Any:
    """The part to check of a kernel over pages with these tensors of state."""
    return select_blocks(" ".join(["params", "grads", *states, "block_owners", "diverged"]), BLOCK)


def slot_blocks(
    record: type, block_owners: Any, hyper: Any, report: Any, size: int
) -> tuple[np.ndarray, np.ndarray, SimpleNamespace, np.ndarray]:
    """(whether it has an owner, whether it is updated, its Hyper, its clipping factor) of each of `size` values."""
    owner = np.repeat(block_owners.astype(np.int64), BLOCK)[:size]
    has_owner = owner != NO_OWNER
    owner = np.where(has_owner, owner, 0)
    columns = struct_columns(record, hyper)
    by_value = {name: getattr(columns, name)[owner] for name in struct_fields(record)}
    _, factor, fine, _ = report.reshape(-1, 4)[owner // 2].T
    return has_owner, has_owner & (fine != 0), SimpleNamespace(**by_value), factor


def apply_update(
    moved: Moved,
    record: type,
    params: Any,
    grads: Any,
    states: Sequence[Any],
    block_owners: Any,
    hyper: Any,
    report: Any,
) -> tuple[Any, ...]:
    """(parameters, gradients, states...) after an update."""
    has_owner, go, h, factor = slot_blocks(record, block_owners, hyper, report, params.size)
    new = moved(h, params, grads * factor, *states)
    params, *new_states = (np.where(go, now, old) for now, old in zip(new, (params, *states), strict=False))
    return params, np.where(has_owner, 0, grads), *new_states


def find_diverged(
    moved: Moved,
    record: type,
    params: Any,
    grads: Any,
    states: Sequence[Any],
    block_owners: Any,
    hyper: Any,
    report: Any,
    largest: float = float(np.finfo(np.float32).max),
) -> np.ndarray:
    """1 for each block that would have a parameter beyond MAX_PARAMETER, or a state beyond `largest`; else 0."""
    _, go, h, factor = slot_blocks(record, block_owners, hyper, report, params.size)
    params, *new_states = moved(h, params, grads * factor, *states)
    bad = ~(np.abs(params) <= MAX_PARAMETER)
    for values, _ in zip(new_states, states, strict=False):
        bad |= ~(np.abs(values) <= largest)
    result: np.ndarray = (go & bad).reshape(-1, BLOCK).any(axis=1).astype(np.float64)
    return result


ANOTHER = "it holds the state of another optimizer"


class OptimizerState(Protocol):
    """An optimizer's state of all slots. `pages`: the tensors of each page, in the order in which kernels bind them."""

    @property
    def pages(self) -> Sequence[tuple[Tensor, ...]]: ...

    def initialise(self, device: Device) -> None:
        """Upload tables that say where the state is."""

    def read(self, device: Device, slot: int) -> Arrays:
        """A slot's state by name, as it is stored in checkpoints."""

    def fault(self, slot: int, arrays: Mapping[str, np.ndarray]) -> str | None:
        """Why a slot's stored state cannot be loaded; None if it can."""

    def write(self, device: Device, slot: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Upload a slot's state as `read` returned it; what is missing in `arrays` becomes zero."""

    def fill(self, device: Device, rng: np.random.Generator) -> None:
        """Fill it with random values, as after some steps."""


def wrong_values(
    name: str, values: np.ndarray, dtype: type, shape: tuple[int, ...], minimum: float | None
) -> str | None:
    """Why an array of a checkpoint is invalid; None if it is valid."""
    if values.dtype != dtype or values.shape != shape:
        return f"{name} is {values.dtype} {list(values.shape)}, expected {np.dtype(dtype)} {list(shape)}"
    numbers = as_float64(values)
    if not np.isfinite(numbers).all():
        return f"{name} has values that are not finite"
    if minimum is not None and (numbers < minimum).any():
        return f"{name} has values below {minimum:g}"
    return None


def laid_out(region: PageRegion, values: np.ndarray, fill: int = 0) -> np.ndarray:
    """An array in its padded shape."""
    result, matrix = np.full(region.shape, fill, values.dtype), np.atleast_2d(values)
    result[: matrix.shape[0], : matrix.shape[1]] = matrix
    return result


class PlainState:
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

    def _regions(self, state: State, slot: int) -> dict[str, PageRegion]:
        """The regions of a slot's arrays, by the names of their state."""
        return {f"{name}.{state.name}": region for name, region in self.trained.regions(slot).items()}

    def read(self, device: Device, slot: int) -> Arrays:
        result: Arrays = {}
        for at, state in enumerate(self.states):
            host = [device.read(page[at].storage.buffer).view(NUMPY[state.dtype]) for page in self.pages]
            for name, region in self._regions(state, slot).items():
                if state.by_parameter:
                    result[name] = region.cropped(host[region.page])
                    continue
                first = region.first // BLOCK * state.values
                values = host[region.page][first : first + region.blocks * state.values]
                result[name] = values.reshape(region.blocks, state.values).copy()
        return result

    def fault(self, slot: int, arrays: Mapping[str, np.ndarray]) -> str | None:
        expected = {
            name: (state, region.stored_shape if state.by_parameter else (region.blocks, state.values))
            for state in self.states
            for name, region in self._regions(state, slot).items()
        }
        if set(arrays) != set(expected):
            return ANOTHER
        for name, (state, shape) in expected.items():
            if wrong := wrong_values(name, arrays[name], NUMPY[state.dtype], shape, state.minimum):
                return wrong
        return None

    def write(self, device: Device, slot: int, arrays: Mapping[str, np.ndarray]) -> None:
        for at, state in enumerate(self.states):
            pages = [page[at] for page in self.pages]
            for name, region in self._regions(state, slot).items():
                values = arrays.get(name)
                if values is None:
                    values = np.zeros(region.blocks * state.values, NUMPY[state.dtype])
                elif state.by_parameter:
                    values = laid_out(region, values)
                device.write(pages[region.page].storage.buffer, values, region.first // BLOCK * state.block_bytes)

    def fill(self, device: Device, rng: np.random.Generator) -> None:
        for at, state in enumerate(self.states):
            draw = rng.standard_normal if state.minimum is None else rng.random
            for page in self.pages:
                floats = state.dtype in ("f32", "bf16")
                values = draw(page[at].shape, np.float32) if floats else np.zeros(page[at].shape, np.float32)
                values = (values + (state.minimum or 0)).astype(np.float32)
                bits = values.view(np.uint32) >> 16 if state.dtype == "bf16" else values
                device.write(page[at].storage.buffer, bits.astype(NUMPY[state.dtype]))
