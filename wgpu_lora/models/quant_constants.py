"""Constants of quantised matrices as parameters: their tables and scales in f32, while the codes stay frozen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import BindingTooLarge
from wgpu_lora.gpu.tensor import Storage, Tensor, persistent
from wgpu_lora.models.batch_inputs import StepInputs
from wgpu_lora.models.model_config import ModelConfig
from wgpu_lora.models.parameters import PAGE_BLOCKS, PageRegion, blocks_of, padded_table, read_arrays, write_array
from wgpu_lora.ops.gradient_norm import BLOCK
from wgpu_lora.ops.linear.trained_matrix import TrainedMatrix, snap_f16
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.weights.base import ConstantWeight


@dataclass(frozen=True)
class QuantConstants:
    """The constants of some matrices of a model, in one slot. `declare` allocates nothing.

    operands: pages like params, which the products read: the parameters themselves, or rounded to f16 (see `snap`).
    names: of all arrays, such as 'model.layers.0.mlp.up_proj.table'.
    """

    weights: Mapping[str, ConstantWeight]  # by module
    params: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]
    operands: tuple[Tensor, ...]
    snapped: Tensor  # u32 [1]
    block_owners: tuple[np.ndarray, ...]
    names: Mapping[str, PageRegion]

    @classmethod
    def declare(cls, weights: Mapping[str, ConstantWeight], max_binding: int) -> QuantConstants:
        """Raises BindingTooLarge if a constant of one matrix does not fit a binding."""
        limit = max(1, max_binding // (4 * BLOCK * PAGE_BLOCKS)) * PAGE_BLOCKS
        block_counts, names = [0], {}
        for module, weight in weights.items():
            for name, shape in weight.constant_shapes().items():
                blocks = blocks_of(shape)
                if blocks > limit:
                    raise BindingTooLarge(f"{module}.{name}", 4 * BLOCK * blocks, max_binding)
                if block_counts[-1] and block_counts[-1] + blocks > limit:
                    block_counts.append(0)
                names[f"{module}.{name}"] = PageRegion(len(block_counts) - 1, block_counts[-1] * BLOCK, shape, shape)
                block_counts[-1] += blocks
        block_owners = tuple(padded_table([0] * count) for count in block_counts)

        def pages(kind: str, group: str) -> tuple[Tensor, ...]:
            sizes = [table.size * BLOCK for table in block_owners]
            return tuple(persistent((size,), "f32", group, f"{kind} {i}") for i, size in enumerate(sizes))

        params, grads, read = pages("constants", "adapters"), pages("grads", "optimizer"), pages("used", "adapters")
        snapped = persistent((1,), "u32", "adapters", "snapped")
        return cls(weights, params, grads, read, snapped, block_owners, names)

    @property
    def slots(self) -> int:
        return 1

    def storages(self) -> set[Storage]:
        return {tensor.storage for tensor in (*self.params, *self.operands, self.snapped)}

    def record_use(self, rec: Recorder) -> None:
        for params, operand in zip(self.params, self.operands, strict=True):
            rec.dispatch(snap_f16, params, self.snapped, operand, size=params.size)

    def bind(self, inputs: StepInputs) -> dict[str, TrainedMatrix]:
        return {
            module: weight.with_constants(
                self._views(module, weight, self.operands),
                self._views(module, weight, self.grads),
                inputs.slot_ranges,
            )
            for module, weight in self.weights.items()
        }

    def _views(self, module: str, weight: ConstantWeight, pages: tuple[Tensor, ...]) -> dict[str, Tensor]:
        result = {}
        for name, shape in weight.constant_shapes().items():
            region = self.names[f"{module}.{name}"]
            result[name] = Tensor(shape, "f32", pages[region.page].storage, 4 * region.first, f"{module}.{name}")
        return result

    # -- host side -------------------------------------------------------------------------------------------------

    def upload_constants(self, device: Device) -> None:
        self.snap(device, False)

    def snap(self, device: Device, snapped: bool) -> None:
        """Whether passes read the parameters rounded to f16, from the next one on; gradients stay those by f32."""
        device.write(self.snapped.storage.buffer, np.array([snapped], np.uint32))

    def regions(self, slot: int) -> dict[str, PageRegion]:
        return dict(self.names)

    def initial(self, device: Device) -> dict[str, np.ndarray]:
        """The constants of the loaded weights, f32, by name."""
        return {
            f"{module}.{name}": values
            for module, weight in self.weights.items()
            for name, values in weight.read_constants(device).items()
        }

    def write(self, device: Device, arrays: Mapping[str, np.ndarray]) -> None:
        for name, values in arrays.items():
            write_array(device, self.params, self.names[name], values)

    def read(self, device: Device) -> dict[str, np.ndarray]:
        return read_arrays(device, self.params, self.names)

    def trainable(self, slot: int, config: ModelConfig) -> int:
        return sum(math.prod(region.stored_shape) for region in self.names.values())
