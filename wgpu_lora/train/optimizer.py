"""An optimizer over a set of parameters: its state on the device and in checkpoints, and the update program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.struct import struct_array, struct_words
from wgpu_lora.gpu.tensor import NUMPY, Storage, Tensor, persistent
from wgpu_lora.gpu.values import widened
from wgpu_lora.models.parameters import ParameterSet, Place, read_arrays, write_array
from wgpu_lora.ops.optimizer import BLOCK, Clip, gradient_norm, square_sums, update_gate
from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.train.optimizers import OPTIMIZERS
from wgpu_lora.train.optimizers.base import Page, State
from wgpu_lora.train.own_options import created

Arrays = dict[str, np.ndarray]
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
        name: one of OPTIMIZERS.
    """

    def __init__(self, device: Device, trained: ParameterSet, total: Tensor, name: str = TrainingArguments.optim):
        self.trained, self.total, self.rule = trained, total, OPTIMIZERS[name]
        self.slots = trained.slots
        blocks = [table.size for table in trained.block_slots]
        self.state = {
            state: tuple(
                persistent((count * state.values,), state.dtype, "optimizer", f"{state.name} {i}")
                for i, count in enumerate(blocks)
            )
            for state in self.rule.state
        }
        self.block_slots = persistent((sum(blocks),), "u32", "optimizer", "block slots")
        self.hyper = persistent((self.slots, struct_words(self.rule.Hyper)), "f32", "optimizer", "hyper")
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
        program.dispatch(gradient_norm, sums, self.block_slots, self.clips, self.total, self.report, **shape)
        pages = [self._page(i, span) for i, span in enumerate(spans)]
        for page, span in zip(pages, spans, strict=True):
            self.rule.record_check(program, page, diverged.rows(*span))
        program.dispatch(update_gate, diverged, self.block_slots, self.report, **shape)
        for page in pages:
            self.rule.record_update(program, page)

    def _page(self, i: int, span: tuple[int, int]) -> Page:
        state = tuple(pages[i] for pages in self.state.values())
        params, grads = self.trained.params[i], self.trained.grads[i]
        block_slots = self.block_slots.rows(*span)
        return Page(span[1] - span[0], params, grads, state, block_slots, self.hyper, self.report)

    def storages(self) -> set[Storage]:
        return self.program.persistent_storages()

    def initialise(self, device: Device) -> None:
        device.write(self.block_slots.storage.buffer, np.concatenate(self.trained.block_slots))

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
        asked = [updates.get(slot) for slot in range(self.slots)]
        hyper = [u and created(self.rule, u.args, "optim").hyper(u.step, u.learning_rate) for u in asked]
        clips = [u and Clip(u.args.max_grad_norm) for u in asked]
        return {self.hyper: struct_array(self.rule.Hyper, hyper), self.clips: struct_array(Clip, clips)}

    # -- what is saved ---------------------------------------------------------------------------------------------

    def read_state(self, device: Device, slot: int) -> Arrays:
        """A slot's state by name. State by parameter has its array's shape, other state [blocks, values]."""
        found: Arrays = {}
        for state, pages in self.state.items():
            places = self._places(state, slot)
            if state.by_parameter:
                found |= read_arrays(device, pages, places)
                continue
            host = [device.read(page.storage.buffer).view(NUMPY[state.dtype]) for page in pages]
            for name, place in places.items():
                first = place.first // BLOCK * state.values
                values = host[place.page][first : first + place.blocks * state.values]
                found[name] = values.reshape(place.blocks, state.values).copy()
        return found

    def fault(self, slot: int, stored: Mapping[str, np.ndarray]) -> str | None:
        """What is wrong with a slot's stored state; None if it can be loaded."""
        shapes: dict[str, tuple[State, tuple[int, ...]]] = {}
        for state in self.rule.state:
            for name, place in self._places(state, slot).items():
                shapes[name] = state, place.own if state.by_parameter else (place.blocks, state.values)
        if set(stored) != set(shapes):
            return "it holds the state of another optimizer"
        for name, (state, shape) in shapes.items():
            values, dtype = stored[name], np.dtype(NUMPY[state.dtype])
            if values.dtype != dtype or values.shape != shape:
                return f"{name} is {values.dtype} {list(values.shape)}, expected {dtype} {list(shape)}"
            values = widened(values)
            if not np.isfinite(values).all():
                return f"{name} has values that are not finite"
            if state.least is not None and (values < state.least).any():
                return f"{name} has values below {state.least:g}"
        return None

    def write_state(self, device: Device, slot: int, stored: Mapping[str, np.ndarray]) -> None:
        """Upload a slot's state as `read_state` returned it; what is missing in `stored` becomes zero."""
        for state, pages in self.state.items():
            for name, place in self._places(state, slot).items():
                values = stored.get(name)
                if values is not None and state.by_parameter:
                    write_array(device, pages, place, values)
                    continue
                if values is None:
                    values = np.zeros(place.blocks * state.values, NUMPY[state.dtype])
                device.write(pages[place.page].storage.buffer, values, place.first // BLOCK * state.block_bytes)

    def _places(self, state: State, slot: int) -> dict[str, Place]:
        """The places of a slot's arrays, by the names of their state."""
        return {f"{name}.{state.name}": place for name, place in self.trained.places(slot).items()}
