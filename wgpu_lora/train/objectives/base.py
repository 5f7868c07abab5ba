"""The interface of training objectives, and their inputs for a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from wgpu_lora.data.columns import RowFormats
from wgpu_lora.data.examples import Sample
from wgpu_lora.data.formats import EXAMPLES
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.tensor import NUMPY, Tensor, persistent
from wgpu_lora.models.inputs import Segment
from wgpu_lora.models.placing import extend
from wgpu_lora.ops.recorder import Recorder


@dataclass(frozen=True)
class Group:
    """A sample's segments in a batch: its examples with the adapter on and, for a reference pass, also with it off.

    weight: 1 / the number of units that the optimizer step's loss is averaged over. value: of the sample.
    """

    segments: tuple[Segment, ...]
    slot: int = 0
    weight: float = 1.0
    value: float = 1.0

    @property
    def tokens(self) -> int:
        return sum(segment.tokens for segment in self.segments)


@dataclass(frozen=True)
class GroupTensors:
    """The groups of a batch in slot order, at most G.

    members u32 [G, members, 2]: [start, stop) of each segment among the targets. weights, values f32 [G]: of the
    groups, with weight 0 for padding. ranges u32 [slots, 2]: of G.
    """

    members: Tensor
    weights: Tensor
    values: Tensor
    ranges: Tensor


@dataclass(frozen=True)
class Scoring:
    """Inputs of one objective for a batch of R targets.

    weights f32 [R]: the group's weight; 0 with the adapter off, for padding and for tokens of other objectives.
    ranges u32 [slots, 2]: of R. groups: only if the objective's unit is the group.
    values f32 [R]: of each token's row; only if the objective is `valued`.
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
        size = max(1, tokens // (2 * objective.members))  # a segment has at least two tokens
        groups = GroupTensors(
            members=make("members", size, objective.members, 2),
            weights=make("group weights", size, dtype="f32"),
            values=make("group values", size, dtype="f32"),
            ranges=make("group ranges", slots, 2),
        )
        return cls(*own, groups, values)

    @property
    def loss_ranges(self) -> Tensor:
        """Ranges of the losses by slot: of tokens, or of groups if they are the unit."""
        return self.groups.ranges if self.groups else self.ranges

    def tensors(self) -> list[Tensor]:
        values = [self.values] if self.values else []
        return [self.weights, self.ranges, *values, *(vars(self.groups).values() if self.groups else [])]

    def upload(self, device: Device, groups: Sequence[Group], places: Sequence[np.ndarray]) -> None:
        """Fill the tensors. places: [start, stop) among R for each segment of each group."""
        values = {tensor: np.zeros(tensor.shape, NUMPY[tensor.dtype]) for tensor in self.tensors()}
        order = sorted(range(len(groups)), key=lambda i: groups[i].slot)
        for at, number in enumerate(order):
            group, place = groups[number], places[number]
            for segment, (start, stop) in zip(group.segments, place, strict=True):
                if segment.slot is not None:
                    values[self.weights][start:stop] = group.weight
                    if self.values:
                        values[self.values][start:stop] = group.value
                    extend(values[self.ranges][group.slot], start, stop)
            if self.groups:
                values[self.groups.members][at] = place
                values[self.groups.weights][at], values[self.groups.values][at] = group.weight, group.value
                extend(values[self.groups.ranges][group.slot], at, at + 1)
        for tensor, array in values.items():
            device.write(tensor.storage.buffer, array)


@dataclass(frozen=True)
class Score:
    """The result of an objective for a batch.

    weights f32 [R]: weight of each target token's -log p in the step's loss, i.e. the loss's derivative by it; 0 for
    tokens of other objectives. losses f32, by token [R] or by group [G] (the objective's unit): their sum over a step,
    divided by the number of units, is the step's loss; likewise `metrics`, by name.
    """

    weights: Tensor
    losses: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Objective:
    """A training objective: a frozen dataclass whose fields are the training options that it reads, and its own
    (`own_option`).

    formats: the rows that it reads, by their columns; by default those that are one example.
    unit: what the loss is averaged over. parts: examples per sample, which stay in one batch. reference: whether each
    example also passes through the base model alone, in the same batch. valued: whether it reads the value of each
    token's row (`Sample.value`). metrics: values logged beside the loss.
    """

    formats: ClassVar[RowFormats[Sample]] = EXAMPLES
    unit: ClassVar[Literal["token", "group"]] = "token"
    parts: ClassVar[int] = 1
    reference: ClassVar[bool] = False
    valued: ClassVar[bool] = False
    metrics: ClassVar[tuple[str, ...]] = ()

    @property
    def members(self) -> int:
        """Segments per group."""
        return self.parts * (2 if self.reference else 1)

    def score(self, rec: Recorder, logprobs: Tensor, scoring: Scoring) -> Score:
        """Record the computation of weights and losses from log-probabilities f32 [R]."""
        raise NotImplementedError
