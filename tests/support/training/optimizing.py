"""Optimizers on their own, with gradients from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Arena, allocate, release
from wgpu_lora.gpu.tensor import persistent
from wgpu_lora.models.adapter_set import AdapterSet, SlotSpec
from wgpu_lora.train.optimizers import optimizer_of
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.session.optimizer_update import Optimizer, SlotUpdate, StepReport

Named = Mapping[str, np.ndarray]  # by module.A or module.B
# Limits of our distance to golden optimizers' ends after 200 steps, relative to the way from the start. Codes and signs
# may differ where a value is on a border, and torch's Muon computes in bf16.
GOLDEN_LIMITS = {
    "adamw": 1e-5,
    "adamw_8bit": 1e-2,
    "lion": 1e-2,
    "lion_8bit": 1e-2,
    "muon": 2e-2,
    "sgd": 1e-5,
    "loraplus": 1e-5,
}


class Optimizing:
    """Adapters of several ranks on modules without a model, and their optimizer.

    modules: (out_features, in_features) by name. Matrices are read and written without DoRA's magnitudes.
    """

    def __init__(self, device: Device, modules: Mapping[str, tuple[int, int]], ranks: Sequence[int], **options: Any):
        config: Any = SimpleNamespace(lora_modules=modules, num_hidden_layers=0)
        self.device, self.args = device, TrainingArguments(**options)
        specs = [SlotSpec(rank, dict.fromkeys(modules, 1.0), self.args.use_dora) for rank in ranks]
        self.adapters = AdapterSet.declare(config, specs, device.max_binding)
        self.loss = persistent((len(ranks),), "f32", "optimizer", "loss")
        self.optimizer = Optimizer(device, self.adapters, self.loss, optimizer_of(self.args))
        self.storages = self.adapters.storages() | self.optimizer.storages()
        allocate(device, self.storages)
        self.arena = Arena(device, Arena.sizes_for([self.optimizer.program.plan()]))
        self.optimizer.program.build(self.arena)
        self.optimizer.initialise(device)

    def write(self, slot: int, values: Named, pages: Any = None) -> None:
        pairs = {name[:-2]: (values[f"{name[:-2]}.A"], values[f"{name[:-2]}.B"]) for name in values}
        self.adapters.write(self.device, slot, pairs, pages)

    def read(self, slot: int) -> dict[str, np.ndarray]:
        matrices = self.adapters.read(self.device, slot)
        return {f"{module}.{part}": m for module, pair in matrices.items() for part, m in zip("AB", pair, strict=True)}

    def step(self, gradients: Mapping[int, Named], step: int, rate: float) -> dict[int, StepReport]:
        """A step of the slots that have gradients."""
        for slot, values in gradients.items():
            self.write(slot, values, self.adapters.grads)
        return self.optimizer.apply(self.device, {slot: SlotUpdate(step, rate, self.args) for slot in gradients})

    def close(self) -> None:
        self.optimizer.program.release()
        release(self.device, self.storages)
        self.arena.free()
