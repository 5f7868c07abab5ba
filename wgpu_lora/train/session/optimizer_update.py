"""An optimizer over a set of parameters: its update program, and what a step reports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.struct import struct_array, struct_words
from wgpu_lora.gpu.tensor import Storage, Tensor, persistent
from wgpu_lora.models.parameters import ParameterSet
from wgpu_lora.ops.gradient_norm import Clip, gradient_norm, square_sums, update_gate
from wgpu_lora.train.optimizers import optimizer_of
from wgpu_lora.train.optimizers.update_rule import OptimizerState, Page, UpdateRule
from wgpu_lora.train.option_types import from_options
from wgpu_lora.train.options.training_arguments import TrainingArguments

USUAL = TrainingArguments()


@dataclass(frozen=True)
class StepReport:
    """The result of a step for one slot: the gradient's norm before clipping, and the loss summed over its units.

    applied: whether the slot was updated. diverged: it was not, since the update would have made a weight larger than
    MAX_PARAMETER or non-finite. If neither holds, the gradient or the loss was not finite.
    """

    grad_norm: float
    applied: bool
    diverged: bool
    loss_sum: float


@dataclass(frozen=True)
class SlotUpdate:
    """A slot's update. step: its 1-based count. args: hold the optimizer's options."""

    step: int
    learning_rate: float
    args: TrainingArguments = USUAL


class Optimizer:
    """State, hyper-parameters and the update program. Declaring it allocates nothing.

    Args:
        total: f32 [slots], the loss of the step by slot.
        rule: the optimizer; AdamW if not given.
    """

    def __init__(self, device: Device, trained: ParameterSet, total: Tensor, rule: UpdateRule | None = None):
        self.trained, self.total, self.rule = trained, total, rule or optimizer_of(USUAL)
        self.slots = trained.slots
        blocks = [table.size for table in trained.block_owners]
        self.state: OptimizerState = self.rule.state_class(trained, self.rule.state)
        self.block_owners = persistent((sum(blocks),), "u32", "optimizer", "block owners")
        self.hyper = persistent((2 * self.slots, struct_words(self.rule.Hyper)), "f32", "optimizer", "hyper")
        self.clips = persistent((self.slots, struct_words(Clip)), "f32", "optimizer", "clips")
        self.report = persistent((self.slots, 4), "f32", "optimizer", "report")
        self.program = Program(device, "update")
        self._record(blocks)

    def _record(self, blocks: list[int]) -> None:
        program, all_blocks = self.program, sum(blocks)
        sums, diverged = (program.temp((all_blocks,), name=name) for name in ("square sums", "diverged"))
        spans, first = [], 0
        for count, grads in zip(blocks, self.trained.grads, strict=True):
            spans.append((first, first + count))
            program.dispatch(square_sums, grads, sums.rows(*spans[-1]), blocks=count)
            first += count
        shape: dict[str, Any] = {"slots": self.slots, "blocks": all_blocks}
        program.dispatch(gradient_norm, sums, self.block_owners, self.clips, self.total, self.report, **shape)
        pages = [self._page(i, span) for i, span in enumerate(spans)]
        for page, span in zip(pages, spans, strict=True):
            self.rule.record_check(program, page, diverged.rows(*span))
        program.dispatch(update_gate, diverged, self.block_owners, self.report, **shape)
        for page in pages:
            self.rule.record_update(program, page)

    def _page(self, i: int, span: tuple[int, int]) -> Page:
        params, grads, owners = self.trained.params[i], self.trained.grads[i], self.block_owners.rows(*span)
        return Page(span[1] - span[0], params, grads, self.state.pages[i], owners, self.hyper, self.report, self.state)

    @property
    def state_bytes(self) -> int:
        """Bytes of all slots' state on the device, with its tables."""
        return sum(tensor.nbytes for page in self.state.pages for tensor in page)

    def storages(self) -> set[Storage]:
        return self.program.persistent_storages()

    def initialise(self, device: Device) -> None:
        device.write(self.block_owners.storage.buffer, np.concatenate(self.trained.block_owners))
        self.state.initialise(device)

    # -- a step ----------------------------------------------------------------------------------------------------

    def apply(self, device: Device, updates: Mapping[int, SlotUpdate]) -> dict[int, StepReport]:
        """Update the slots in `updates`, and no others; a slot that would diverge is left as it was."""
        report = self._run(device, updates)
        read = {slot: [float(x) for x in report[slot]] for slot in updates}
        return {
            slot: StepReport(norm, applied := bool(go) and finite, finite and not applied, loss)
            for slot, (norm, _, go, loss) in read.items()
            for finite in [math.isfinite(norm) and math.isfinite(loss)]
        }

    def finite(self, device: Device, slot: int) -> bool:
        """Whether a slot's loss and gradient are finite; updates nothing, and zeroes the gradients."""
        norm, _, _, loss = self._run(device, {})[slot]
        return bool(np.isfinite(norm) and np.isfinite(loss))

    def _run(self, device: Device, updates: Mapping[int, SlotUpdate]) -> np.ndarray:
        """Run the update program; returns its report [slots, 4]."""
        for tensor, values in self.settings(updates).items():
            device.write(tensor.storage.buffer, values)
        self.program.run()
        return device.read(self.report.storage.buffer).view(np.float32).reshape(-1, 4)

    def settings(self, updates: Mapping[int, SlotUpdate]) -> dict[Tensor, np.ndarray]:
        """Inputs of the update program; slots that are not in `updates` take no step."""
        by_slot = [updates.get(slot) for slot in range(self.slots)]
        hyper = [row for update in by_slot for row in (self._hyper(update) if update else (None, None))]
        clips = [u and Clip(u.args.max_grad_norm) for u in by_slot]
        return {self.hyper: struct_array(self.rule.Hyper, hyper), self.clips: struct_array(Clip, clips)}

    def _hyper(self, update: SlotUpdate) -> tuple[Any, Any]:
        """Of A, and of the other matrices, whose learning rate LoRA+ (Hayou et al. 2024) multiplies."""
        rule = from_options(type(self.rule), update.args, "optim")
        rate, ratio = update.learning_rate, update.args.loraplus_lr_ratio
        return rule.hyper(update.step, rate), rule.hyper(update.step, rate * ratio)
