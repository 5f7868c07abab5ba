"""A plain state with tables of the matrices, for optimizers that compute with whole ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.tensor import Tensor, persistent
from wgpu_lora.models.lora import AdapterSet
from wgpu_lora.ops.optimizer import BLOCK, NO_OWNER
from wgpu_lora.train.optimizer_state import Plain
from wgpu_lora.train.optimizers.base import State
from wgpu_lora.train.optimizers.muon_kernels import HOME_WORDS


class WithMatrices(Plain):
    """Each page has two tables besides its states: homes u32 [blocks, 8], the matrix of each block (`Home` in
    shaders/lib/muon.wgsl), and firsts u32 [matrices], the first block of each."""

    def __init__(self, adapters: AdapterSet, states: Sequence[State]):
        super().__init__(adapters, states)
        self._tables = [self._homes(page) for page in range(len(self.pages))]
        self._tensors: list[tuple[Tensor, ...]] = [
            (
                persistent(homes.shape, "u32", "optimizer", f"homes {page}"),
                persistent(firsts.shape, "u32", "optimizer", f"firsts {page}"),
            )
            for page, (homes, firsts) in enumerate(self._tables)
        ]
        self.pages = [(*states, *tables) for states, tables in zip(self.pages, self._tensors, strict=True)]

    def _homes(self, page: int) -> tuple[np.ndarray, np.ndarray]:
        homes = np.full((self.adapters.block_owners[page].size, HOME_WORDS), NO_OWNER, np.uint32)
        firsts: list[int] = []
        for (_, which), factor in self.adapters.factors.items():
            if factor.page != page:
                continue
            rank, is_a = self.adapters.rank, which == "A"
            length = factor.shape[is_a]
            strides = (length, 1) if is_a else (1, rank)
            for slot, spec in enumerate(self.adapters.specs):
                offset = factor.offset + slot * factor.stride
                first = offset // BLOCK
                row = 2 * slot + (not is_a), len(firsts), offset, *strides, length, spec.rank, 0
                homes[first : first + factor.blocks] = row
                firsts.append(first)
        return homes, np.array(firsts, np.uint32)

    def initialise(self, device: Device) -> None:
        for tables, tensors in zip(self._tables, self._tensors, strict=True):
            for values, tensor in zip(tables, tensors, strict=True):
                device.write(tensor.storage.buffer, values)
