"""AdamW over an adapter set: its moments on the device, and the program that applies a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import Storage, Tensor, persistent
from wgpu_lora.models.lora import AdapterSet
from wgpu_lora.ops.optimizer import (
    BLOCK,
    HYPER_FIELDS,
    adamw,
    adamw_check,
    gradient_norm,
    square_sums,
    update_gate,
)


@dataclass(frozen=True)
class StepReport:
    """What a step came to for one slot: the gradient's norm before clipping, the loss summed over trained tokens.

    applied: whether the slot was updated. diverged: it was not, as the update would have left a weight beyond
    MAX_PARAMETER or a value that is not finite; else the gradient or the loss is not finite.
    """

    grad_norm: float
    applied: bool
    diverged: bool
    loss_sum: float


@dataclass(frozen=True)
class AdamWSettings:
    """Names and defaults of transformers' TrainingArguments."""

    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8


@dataclass(frozen=True)
class SlotUpdate:
    """A slot's update; step is its 1-based count."""

    step: int
    learning_rate: float
    settings: AdamWSettings = AdamWSettings()


class Optimizer:
    """Moments, hyper-parameters and the update program. Declaring it allocates nothing."""

    def __init__(self, device: Device, adapters: AdapterSet):
        self.adapters = adapters
        self.slots = len(adapters.specs)

        def pages(kind: str) -> tuple[Tensor, ...]:
            return tuple(persistent(p.shape, "f32", "optimizer", f"{kind} {i}") for i, p in enumerate(adapters.params))

        self.first_moment, self.second_moment = pages("first moment"), pages("second moment")
        blocks = sum(table.size for table in adapters.block_slots)
        self.block_slots = persistent((blocks,), "u32", "optimizer", "block slots")
        self.hyper = persistent((self.slots * HYPER_FIELDS,), "f32", "optimizer", "hyper")
        self.report = persistent((self.slots, 4), "f32", "optimizer", "report")
        self.total = persistent((self.slots,), "f32", "optimizer", "loss total")
        self.program = Program(device, "update")
        self._record(blocks)

    def _record(self, blocks: int) -> None:
        program = self.program
        sums = program.temp((blocks,), name="square sums")
        spans, first = [], 0
        for table, grads in zip(self.adapters.block_slots, self.adapters.grads, strict=True):
            spans.append((first, first + table.size))
            program.dispatch(square_sums, grads, sums.rows(*spans[-1]), blocks=table.size)
            first += table.size
        program.dispatch(
            gradient_norm, sums, self.block_slots, self.hyper, self.total, self.report, slots=self.slots, blocks=blocks
        )
        diverged = program.temp((blocks,), name="diverged")
        for i, span in enumerate(spans):
            program.dispatch(adamw_check, *self._page(i, span), diverged.rows(*span), blocks=span[1] - span[0])
        program.dispatch(update_gate, diverged, self.block_slots, self.report, slots=self.slots, blocks=blocks)
        for i, span in enumerate(spans):
            program.dispatch(adamw, *self._page(i, span), size=(span[1] - span[0]) * BLOCK)

    def _page(self, i: int, span: tuple[int, int]) -> tuple[Tensor, ...]:
        """What the update of page `i`, whose blocks are `span`, reads and writes."""
        values = (self.adapters.params, self.adapters.grads, self.first_moment, self.second_moment)
        return (*(pages[i] for pages in values), self.block_slots.rows(*span), self.hyper, self.report)

    def storages(self) -> set[Storage]:
        return self.program.persistent_storages()

    def initialise(self, device: Device) -> None:
        device.write(self.block_slots.storage.buffer, np.concatenate(self.adapters.block_slots))

    def begin(self, device: Device) -> None:
        """Zeroes the loss totals of the step; gradients were zeroed by the last update."""
        device.write(self.total.storage.buffer, np.zeros(self.slots, np.float32))

    def apply(self, device: Device, updates: Mapping[int, SlotUpdate]) -> dict[int, StepReport]:
        """Updates the slots that `updates` names, and no other; one that would not stay in order is left as it was."""
        hyper = np.zeros((self.slots, HYPER_FIELDS), np.float32)
        for slot, update in updates.items():
            s, step = update.settings, update.step
            corrections = (1 - s.adam_beta1**step, 1 - s.adam_beta2**step)
            hyper[slot, :11] = (
                update.learning_rate,
                s.adam_beta1,
                s.adam_beta2,
                s.adam_epsilon,
                s.weight_decay,
                *corrections,
                s.max_grad_norm,
                1.0,
                1 - s.adam_beta1,
                1 - s.adam_beta2,
            )
        report = self._run(device, hyper)
        read = {slot: [float(x) for x in report[slot]] for slot in updates}
        return {
            slot: StepReport(norm, applied := bool(go) and finite, finite and not applied, loss)
            for slot, (norm, _, go, loss) in read.items()
            for finite in [math.isfinite(norm) and math.isfinite(loss)]
        }

    def finite(self, device: Device, slot: int) -> bool:
        """Whether a slot's loss and gradient are finite; nothing is updated, and gradients are zeroed."""
        norm, _, _, loss = self._run(device, np.zeros((self.slots, HYPER_FIELDS), np.float32))[slot]
        return bool(np.isfinite(norm) and np.isfinite(loss))

    def _run(self, device: Device, hyper: np.ndarray) -> np.ndarray:
        """The report [slots, 4] of the update program."""
        device.write(self.hyper.storage.buffer, hyper)
        self.program.run()
        return device.read(self.report.storage.buffer).view(np.float32).reshape(-1, 4)
