"""What an objective has to say of itself, and what it is given of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from wgpu_lora.data import Sample, one_example
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.tensor import NUMPY, Tensor, persistent
from wgpu_lora.models.inputs import Segment
from wgpu_lora.ops.recorder import Recorder


@dataclass(frozen=True)
class Group:
    """What a sample has in a batch: its examples with the adapter on, then, for a reference pass, with it off.

    weight: 1 / what the optimizer step's loss is a mean over. value: the sample's.
    """

    segments: tuple[Segment, ...]
    slot: int = 0
    weight: float = 1.0
    value: float = 1.0

    @property
    def tokens(self) -> int:
        return sum(len(segment.input_ids) for segment in self.segments)


@dataclass(frozen=True)
class GroupTensors:
    """The groups of a batch in order of slots, G at most.

    members u32 [G, members, 2]: [start, stop) among the targets of each of a group's segments. weights, values f32 [G]:
    the groups' own, weight 0 for padding. ranges u32 [slots, 2] of G.
    """

    members: Tensor
    weights: Tensor
    values: Tensor
    ranges: Tensor


@dataclass(frozen=True)
class Scoring:
    """What a batch of R targets says of one objective's slots.

    weights f32 [R]: the group's weight; 0 where the adapter is off, for padding and for other objectives' tokens.
    ranges u32 [slots, 2] of R. groups: where the objective's unit is the group. values f32 [R]: each row's own, where
    the objective asks for them.
    """

    weights: Tensor
    ranges: Tensor
    groups: GroupTensors | None = None
    values: Tensor | None = None

    @classmethod
    def declare(cls, objective: Objective, tokens: int, slots: int) -> Scoring:
        def make(name: str, *shape: int, dtype: str = "u32") -> Tensor:
            return persistent(shape, dtype, "workspace", f"{name} [{tokens}]")

        values = make("token values", tokens, dtype="f32") if objective.valued else None
        own = make("token weights", tokens, dtype="f32"), make("token ranges", slots, 2)
        if objective.unit == "token":
            return cls(*own, values=values)
        size = max(1, tokens // (2 * objective.members))  # a segment has two tokens at least
        groups = GroupTensors(
            members=make("members", size, objective.members, 2),
            weights=make("group weights", size, dtype="f32"),
            values=make("group values", size, dtype="f32"),
            ranges=make("group ranges", slots, 2),
        )
        return cls(*own, groups, values)

    @property
    def loss_ranges(self) -> Tensor:
        """Whose each loss is: of tokens, or of groups where they are the unit."""
        return self.groups.ranges if self.groups else self.ranges

    def tensors(self) -> list[Tensor]:
        values = [self.values] if self.values else []
        return [self.weights, self.ranges, *values, *(vars(self.groups).values() if self.groups else [])]

    def upload(self, device: Device, groups: Sequence[Group], places: Sequence[np.ndarray]) -> None:
        """Fills the tensors. places: [start, stop) among R of each segment of each group."""
        values = {tensor: np.zeros(tensor.shape, NUMPY[tensor.dtype]) for tensor in self.tensors()}
        order = sorted(range(len(groups)), key=lambda i: groups[i].slot)
        for at, number in enumerate(order):
            group, place = groups[number], places[number]
            for segment, (start, stop) in zip(group.segments, place, strict=True):
                if segment.slot is not None:
                    values[self.weights][start:stop] = group.weight
                    if self.values:
                        values[self.values][start:stop] = group.value
                    _extend(values[self.ranges][group.slot], start, stop)
            if self.groups:
                values[self.groups.members][at] = place
                values[self.groups.weights][at], values[self.groups.values][at] = group.weight, group.value
                _extend(values[self.groups.ranges][group.slot], at, at + 1)
        for tensor, array in values.items():
            device.write(tensor.storage.buffer, array)


def _extend(span: np.ndarray, start: int, stop: int) -> None:
    """Takes what follows into [start, stop), which is empty at first."""
    span[:] = (start if span[1] == 0 else min(span[0], start), max(span[1], stop))


@dataclass(frozen=True)
class Score:
    """What an objective makes of a batch.

    weights f32 [R]: of each target token's -log p in the step's loss, that is the loss's derivative by it; 0 for tokens
    of other objectives. losses f32, by token [R] or by group [G] as the objective's unit is: their sum over a step is
    the step's loss times what it is a mean over; likewise `metrics`, by name.
    """

    weights: Tensor
    losses: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Objective:
    """What is learnt from rows: a frozen dataclass, whose fields are the training options that it reads.

    unit: what the loss is a mean over. parts: how many examples a sample has; they stay in one batch. reference:
    whether each goes through the base alone too, in the same batch. valued: whether it reads the value of each token's
    row (`Sample.value`). metrics: what is logged beside the loss.
    """

    unit: ClassVar[Literal["token", "group"]] = "token"
    parts: ClassVar[int] = 1
    reference: ClassVar[bool] = False
    valued: ClassVar[bool] = False
    metrics: ClassVar[tuple[str, ...]] = ()

    @property
    def members(self) -> int:
        """Segments of a group."""
        return self.parts * (2 if self.reference else 1)

    def sample(self, row: dict[str, Any]) -> Sample:
        """What there is to learn in a row of the data.

        Raises:
            UserError: the row has not what the objective needs; the message says which key, not which line.
        """
        return one_example(row)

    def score(self, rec: Recorder, logprobs: Tensor, scoring: Scoring) -> Score:
        """Records what turns log-probabilities f32 [R] into weights and losses."""
        raise NotImplementedError
