"""A plain state with tables of the matrices, for optimizers that compute with whole ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.tensor import Tensor, persistent
from wgpu_lora.models.parameters import ParameterSet
from wgpu_lora.names.naming import setting
from wgpu_lora.ops.optimizer import BLOCK, NO_OWNER
from wgpu_lora.train.optimizers.base import State
from wgpu_lora.train.optimizers.muon_kernels import HOME_WORDS
from wgpu_lora.train.optimizers.state import Plain


class WithMatrices(Plain):
    """Each page has two tables besides its states: homes u32 [blocks, 8], the matrix of each block (`Home` in
    shaders/lib/muon.wgsl), and firsts u32 [matrices], the first block of each.

    rank: of all A and B, as they are padded.

    Raises:
        UserError: the run trains something else than A and B.
    """

    def __init__(self, trained: ParameterSet, states: Sequence[State]):
        super().__init__(trained, states)
        homes = [np.full((owners.size, HOME_WORDS), NO_OWNER, np.uint32) for owners in trained.block_owners]
        firsts: list[list[int]] = [[] for _ in homes]
        for slot in range(trained.slots):
            for name, place in trained.places(slot).items():
                which = name.rpartition(".")[2]
                if which not in ("A", "B"):
                    muon = setting("optim", "muon")
                    raise UserError(f"{muon} trains the A and B of LoRA only, not {name}: choose another optimizer.")
                is_a, (rows, cols) = which == "A", place.shape
                self.rank, length = (rows, cols) if is_a else (cols, rows)
                strides = (length, 1) if is_a else (1, self.rank)
                own, first, numbers = place.own[not is_a], place.first // BLOCK, firsts[place.page]
                row = 2 * slot + (not is_a), len(numbers), place.first, *strides, length, own, 0
                homes[place.page][first : first + place.blocks] = row
                numbers.append(first)
        self._tables = [(table, np.array(numbers, np.uint32)) for table, numbers in zip(homes, firsts, strict=True)]
        self._tensors: list[tuple[Tensor, ...]] = [
            tuple(
                persistent(values.shape, "u32", "optimizer", f"{name} {page}")
                for name, values in zip(("homes", "firsts"), tables, strict=True)
            )
            for page, tables in enumerate(self._tables)
        ]
        self.pages = [(*kept, *tables) for kept, tables in zip(self.pages, self._tensors, strict=True)]

    def initialise(self, device: Device) -> None:
        for tables, tensors in zip(self._tables, self._tensors, strict=True):
            for values, tensor in zip(tables, tensors, strict=True):
                device.write(tensor.storage.buffer, values)
