"""LoRA adapters on the device: flat pages of parameters and gradients, seen as stacked factors by module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wgpu_lora.formats.peft import AdapterConfig, module_path
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.tensor import Storage, Tensor, persistent
from wgpu_lora.models.config import ModelConfig
from wgpu_lora.models.decoder import Adapters
from wgpu_lora.models.inputs import StepInputs
from wgpu_lora.ops.linear import LoraSlots
from wgpu_lora.ops.optimizer import BLOCK, NO_SLOT

PAGE_BLOCKS = 64  # a page is whole multiples of this, so that its part of a per-block table can be bound
Module = tuple[int, str]  # (layer, "q_proj")
Matrices = Mapping[Module, tuple[np.ndarray, np.ndarray]]  # A [rank, in], B [out, rank]


@dataclass(frozen=True)
class SlotSpec:
    """One adapter: its (largest) rank, and the factor of each module it targets: alpha / r, or alpha / sqrt(r)."""

    rank: int
    scaling: Mapping[Module, float]

    @classmethod
    def of(cls, config: AdapterConfig, modules: Sequence[Module]) -> SlotSpec:
        paths = {key: module_path(*key) for key in modules}
        return cls(
            max(config.rank(path) for path in paths.values()),
            {key: config.scaling(path) for key, path in paths.items()},
        )


@dataclass(frozen=True)
class Factor:
    """Where a module's A or B of all slots lies: page, offset and stride in values; the matrix's padded shape."""

    page: int
    offset: int
    stride: int
    shape: tuple[int, int]


@dataclass(frozen=True)
class AdapterSet:
    """Every slot's adapter. `declare` allocates nothing; gradients exist only where a program uses them.

    A page is a flat f32 tensor no larger than a binding. Each slot's matrix is padded to whole blocks of 1024 values,
    so that one table, block -> slot, tells the optimizer whose every value is.
    """

    specs: Sequence[SlotSpec]
    rank: int
    params: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]
    block_slots: tuple[np.ndarray, ...]  # a page's; NO_SLOT for padding
    factors: Mapping[tuple[int, str, str], Factor]  # (layer, module, "A" or "B")
    scales: Mapping[Module, Tensor]
    numbers: Mapping[Module, int]  # what dropout's draws are keyed by, whichever modules other slots have

    @classmethod
    def declare(cls, config: ModelConfig, specs: Sequence[SlotSpec], max_binding: int) -> AdapterSet:
        slots, rank = len(specs), max(spec.rank for spec in specs)
        shapes = config.linear_shapes()
        everything = [(i, m) for i in range(config.num_hidden_layers) for m in shapes]
        order = [key for key in everything if any(key in spec.scaling for spec in specs)]
        limit = max_binding // (4 * BLOCK * PAGE_BLOCKS) * PAGE_BLOCKS
        factors: dict[tuple[int, str, str], Factor] = {}
        used: list[list[int]] = [[]]
        for layer, module in order:
            out, size_in = shapes[module]
            for which, shape in (("A", (rank, size_in)), ("B", (out, rank))):
                blocks = -(-shape[0] * shape[1] // BLOCK)
                if used[-1] and len(used[-1]) + blocks * slots > limit:
                    used.append([])
                factors[layer, module, which] = Factor(len(used) - 1, len(used[-1]) * BLOCK, blocks * BLOCK, shape)
                used[-1] += [slot for slot in range(slots) for _ in range(blocks)]
        tables = tuple(_padded(blocks) for blocks in used)

        def pages(kind: str, group: str) -> tuple[Tensor, ...]:
            return tuple(persistent((t.size * BLOCK,), "f32", group, f"{kind} {i}") for i, t in enumerate(tables))

        numbers = {key: everything.index(key) for key in order}
        scales = {key: persistent((slots,), "f32", "adapters", f"scale {key}") for key in order}
        params, grads = pages("params", "adapters"), pages("grads", "optimizer")
        return cls(specs, rank, params, grads, tables, factors, scales, numbers)

    def storages(self) -> set[Storage]:
        """Parameters and scales; gradients are allocated with the program that writes them."""
        return {t.storage for t in (*self.params, *self.scales.values())}

    def bind(self, inputs: StepInputs) -> Adapters:
        """Each module's factors with this batch's rows: what the decoder's forward pass asks for."""
        return {
            key: LoraSlots(
                a=self._view(self.params, *key, "A"),
                b=self._view(self.params, *key, "B"),
                grad_a=self._view(self.grads, *key, "A"),
                grad_b=self._view(self.grads, *key, "B"),
                scale=scale,
                ranges=inputs.slot_ranges,
                draws=inputs.draws,
                module=self.numbers[key],
                rank=self.rank,
            )
            for key, scale in self.scales.items()
        }

    def _view(self, pages: Sequence[Tensor], layer: int, module: str, which: str) -> Tensor:
        factor = self.factors[layer, module, which]
        whole = pages[factor.page]
        return Tensor((len(self.specs), factor.stride), "f32", whole.storage, 4 * factor.offset, f"{module}.{which}")

    # -- host side -------------------------------------------------------------------------------------------------

    def upload_scales(self, device: Device) -> None:
        for key, tensor in self.scales.items():
            values = [spec.scaling.get(key, 0.0) for spec in self.specs]
            device.write(tensor.storage.buffer, np.array(values, np.float32))

    def modules(self, slot: int) -> Iterator[Module]:
        return (key for key in self.scales if key in self.specs[slot].scaling)

    def write(self, device: Device, slot: int, matrices: Matrices, pages: Sequence[Tensor] | None = None) -> None:
        """Puts one slot's matrices into `pages` (its parameters by default), padding their rank with zeros."""
        for module, pair in matrices.items():
            for which, matrix in zip("AB", pair, strict=True):
                factor = self.factors[*module, which]
                padded = np.zeros(factor.shape, np.float32)
                padded[: matrix.shape[0], : matrix.shape[1]] = matrix
                buffer = (pages or self.params)[factor.page].storage.buffer
                device.write(buffer, padded, 4 * (factor.offset + slot * factor.stride))

    def read(
        self, device: Device, slot: int, pages: Sequence[Tensor] | None = None
    ) -> dict[Module, tuple[np.ndarray, np.ndarray]]:
        """One slot's (A [rank, in], B [out, rank]) by module, from `pages`, at the slot's own rank."""
        host = [device.read(page.storage.buffer).view(np.float32) for page in pages or self.params]
        rank = self.specs[slot].rank

        def matrix(layer: int, module: str, which: str) -> np.ndarray:
            factor = self.factors[layer, module, which]
            start = factor.offset + slot * factor.stride
            rows, cols = factor.shape
            full = host[factor.page][start : start + rows * cols].reshape(rows, cols)
            return (full[:rank] if which == "A" else full[:, :rank]).copy()

        return {key: (matrix(*key, "A"), matrix(*key, "B")) for key in self.modules(slot)}

    def trainable(self, slot: int, config: ModelConfig) -> int:
        """How many parameters one slot trains."""
        shapes = config.linear_shapes()
        return sum(self.specs[slot].rank * sum(shapes[module]) for _, module in self.modules(slot))


def _padded(block_slots: list[int]) -> np.ndarray:
    table = np.full(max(1, -(-len(block_slots) // PAGE_BLOCKS)) * PAGE_BLOCKS, NO_SLOT, np.uint32)
    table[: len(block_slots)] = block_slots
    return table
