"""The trained parameters as the optimizer sees them: named arrays of each slot in flat pages of parameters and
gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.tensor import Storage, Tensor
from wgpu_lora.models.batch_inputs import StepInputs
from wgpu_lora.models.layer_context import Trained
from wgpu_lora.models.model_config import ModelConfig
from wgpu_lora.ops.gradient_norm import BLOCK, NO_OWNER
from wgpu_lora.ops.recorder import Recorder

PAGE_BLOCKS = 64  # pages are multiples of this, so that offsets into per-block tables are aligned


@dataclass(frozen=True)
class PageRegion:
    """Where an array is: its page, and its first value there, at a whole block.

    shape: there, maybe padded with zeros. stored_shape: in files, where it has the first rows and columns, or is a
    single row [columns].
    """

    page: int
    first: int
    shape: tuple[int, int]
    stored_shape: tuple[int, ...]

    @property
    def blocks(self) -> int:
        return blocks_of(self.shape)

    def padded(self, values: np.ndarray) -> np.ndarray:
        """The values as they lie in the page."""
        if values.shape == self.shape:
            return np.ascontiguousarray(values, np.float32)
        result, matrix = np.zeros(self.shape, np.float32), np.atleast_2d(values)
        result[: matrix.shape[0], : matrix.shape[1]] = matrix
        return result

    def cropped(self, page: np.ndarray) -> np.ndarray:
        """The array, from the values of its page."""
        rows, cols = self.stored_shape if len(self.stored_shape) == 2 else (1, *self.stored_shape)
        values = page[self.first : self.first + math.prod(self.shape)].reshape(self.shape)
        return values[:rows, :cols].reshape(self.stored_shape).copy()


class ParameterSet(Protocol):
    """The parameters of all slots. Gradients are allocated by the programs that use them.

    params, grads: f32 pages, no larger than a binding. block_owners: per page, of each block of BLOCK values,
    2 * slot, + 1 unless it is of an A; NO_OWNER for padding.
    """

    @property
    def params(self) -> tuple[Tensor, ...]: ...

    @property
    def grads(self) -> tuple[Tensor, ...]: ...

    @property
    def block_owners(self) -> tuple[np.ndarray, ...]: ...

    @property
    def slots(self) -> int: ...

    def storages(self) -> set[Storage]:
        """The storages of parameters and constants, without gradients."""

    def record_use(self, rec: Recorder) -> None:
        """Records what a pass computes from the parameters before it reads them."""

    def bind(self, inputs: StepInputs) -> Mapping[str, Trained]:
        """The trained tensors of each module for a batch, for the decoder's forward pass."""

    def upload_constants(self, device: Device) -> None: ...

    def regions(self, slot: int) -> dict[str, PageRegion]:
        """A slot's arrays by name, such as 'model.layers.0.mlp.up_proj.A'."""

    def trainable(self, slot: int, config: ModelConfig) -> int:
        """The number of a slot's parameters."""


def blocks_of(shape: tuple[int, int]) -> int:
    return -(-shape[0] * shape[1] // BLOCK)


def read_arrays(device: Device, pages: Sequence[Tensor], regions: Mapping[str, PageRegion]) -> dict[str, np.ndarray]:
    """The arrays of f32 pages, by name."""
    host = [device.read(page.storage.buffer).view(np.float32) for page in pages]
    return {name: region.cropped(host[region.page]) for name, region in regions.items()}


def write_array(device: Device, pages: Sequence[Tensor], region: PageRegion, values: np.ndarray) -> None:
    device.write(pages[region.page].storage.buffer, region.padded(values), 4 * region.first)


def padded_table(owners: list[int]) -> np.ndarray:
    """The owners of a page's blocks, with NO_OWNER up to a multiple of PAGE_BLOCKS."""
    table = np.full(max(1, -(-len(owners) // PAGE_BLOCKS)) * PAGE_BLOCKS, NO_OWNER, np.uint32)
    table[: len(owners)] = owners
    return table
