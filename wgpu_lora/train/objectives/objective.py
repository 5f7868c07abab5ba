"""The interface of training objectives, and their inputs for a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np

from wgpu_lora.data import Row
from wgpu_lora.data.example_formats import EXAMPLES
from wgpu_lora.data.row_formats import RowFormats
from wgpu_lora.data.tokenized_data import Cut
from wgpu_lora.formats.tokenizer.examples import Sample
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.tensor import NUMPY, Tensor, persistent
from wgpu_lora.models.batch_inputs import Segment, extend_range
from wgpu_lora.ops.loss.loss import VocabularyLogprobs
from wgpu_lora.ops.loss.sparse_logits import NO_ID
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.train.distill.teacher_logits import TeacherRows


@dataclass(frozen=True)
class Group:
    """A sample's segments in a batch, one for each of its examples.

    weight: 1 / the number of units that the optimizer step's loss is averaged over. label: of the sample.
    reference: the sum of each answer's log-probabilities under the reference; None if it is not known yet.
    kl_estimate: a number that all groups of the step have in common, whose meaning the objective defines.
    prompt_targets: the number of targets of each segment that precede its answer; by default none.
    kl_row: the prompt with another sample's answer, if the objective has `needs_kl_rows`.
    index: of the first segment's row in the data (`Row.index`).
    teacher: what the teacher says about the targets of the only segment, if the objective has a `support`; None if it
        is not known yet.
    inputs: f32 [targets, `Objective.token_inputs`] of the only segment, what the objective reads of each token.
    """

    segments: tuple[Segment, ...]
    slot: int = 0
    weight: float = 1.0
    label: float = 1.0
    reference: tuple[float, ...] | None = None
    kl_estimate: float = 0.0
    prompt_targets: tuple[int, ...] = ()
    kl_row: Segment | None = None
    index: int = 0
    teacher: TeacherRows | None = None
    inputs: np.ndarray | None = None

    @property
    def tokens(self) -> int:
        return sum(segment.tokens for segment in self.segments)


def declared_teacher(make: Callable[..., Tensor], tokens: int, support: int) -> TeacherTensors | None:
    if not support:
        return None
    wide = tokens, support + 1
    ids, logprobs = make("teacher ids", *wide), make("teacher log-probabilities", *wide, dtype="f32")
    return TeacherTensors(ids, logprobs, make("target places", tokens))


@dataclass(frozen=True)
class GroupTensors:
    """The groups of a batch in slot order, at most G.

    members u32 [G, members, 2]: [start, stop) of each segment's answer among the targets. starts u32 [G, members]: the
    first of all targets of each segment. weights, values, shared f32 [G]: of the groups, with weight 0 for padding.
    ranges u32 [slots, 2]: of G. reference f32 [G, members]: only if the objective has a `reference`.
    """

    members: Tensor
    starts: Tensor
    weights: Tensor
    values: Tensor
    shared: Tensor
    ranges: Tensor
    reference: Tensor | None = None


@dataclass(frozen=True)
class TeacherTensors:
    """`TeacherRows` of a batch's targets: ids u32 [R, K + 1], logprobs f32 [R, K + 1], target_columns u32 [R].
    Targets of other objectives have no ids."""

    ids: Tensor
    logprobs: Tensor
    target_columns: Tensor

    def fill(self, values: Mapping[Tensor, np.ndarray], start: int, stop: int, rows: TeacherRows) -> None:
        """Set the targets [start, stop)."""
        assert len(rows.target_columns) == stop - start, "the teacher has other targets"
        values[self.ids][start:stop] = rows.ids
        values[self.logprobs][start:stop] = rows.logprobs
        values[self.target_columns][start:stop] = rows.target_columns


@dataclass(frozen=True)
class Scoring:
    """Inputs of one objective for a batch of R targets.

    weights f32 [R]: the group's weight; 0 with the adapter off, for padding and for tokens of other objectives.
    ranges u32 [slots, 2]: of R. groups: only if the objective's unit is the group.
    values f32 [R]: of each token's row; only if the objective has labels. teacher: only if it has a `support`.
    inputs f32 [R, width]: only if it has `token_inputs`.
    """

    weights: Tensor
    ranges: Tensor
    groups: GroupTensors | None = None
    values: Tensor | None = None
    teacher: TeacherTensors | None = None
    inputs: Tensor | None = None

    @classmethod
    def declare(cls, objective: Objective, tokens: int, slots: int) -> Scoring:
        def make(name: str, *shape: int, dtype: str = "u32") -> Tensor:
            return persistent(shape, dtype, "workspace", f"{name} [{tokens}]")

        values = make("token values", tokens, dtype="f32") if objective.has_labels else None
        tensors = make("token weights", tokens, dtype="f32"), make("token ranges", slots, 2)
        width = objective.token_inputs
        inputs = make("token inputs", tokens, width, dtype="f32") if width else None
        if objective.unit == "token":
            return cls(
                *tensors, values=values, teacher=declared_teacher(make, tokens, objective.support), inputs=inputs
            )
        members = objective.rows_per_sample
        size = max(1, tokens // (members + 1))  # a prompt of one token at least, and one for each answer
        groups = GroupTensors(
            members=make("members", size, members, 2),
            starts=make("member starts", size, members),
            weights=make("group weights", size, dtype="f32"),
            values=make("group values", size, dtype="f32"),
            shared=make("shared values", size, dtype="f32"),
            ranges=make("group ranges", slots, 2),
            reference=make("reference", size, members, dtype="f32") if objective.reference and not width else None,
        )
        return cls(*tensors, groups, values, inputs=inputs)

    @property
    def loss_ranges(self) -> Tensor:
        """Ranges of the losses by slot: of tokens, or of groups if they are the unit."""
        return self.groups.ranges if self.groups else self.ranges

    def tensors(self) -> list[Tensor]:
        group_tensors = vars(self.groups).values() if self.groups else []
        teacher = vars(self.teacher).values() if self.teacher else []
        own = self.weights, self.ranges, self.values, self.inputs
        return [tensor for tensor in (*own, *group_tensors, *teacher) if tensor is not None]

    def upload(self, device: Device, groups: Sequence[Group], spans: Sequence[np.ndarray]) -> None:
        """Fill the tensors. spans: [start, stop) among R for each segment of each group."""
        values = {tensor: np.zeros(tensor.shape, NUMPY[tensor.dtype]) for tensor in self.tensors()}
        if self.teacher:
            values[self.teacher.ids].fill(NO_ID)
        order = sorted(range(len(groups)), key=lambda i: groups[i].slot)
        for at, number in enumerate(order):
            group, group_spans = groups[number], spans[number]
            for segment, (start, stop) in zip(group.segments, group_spans, strict=True):
                if segment.slot is not None:
                    values[self.weights][start:stop] = group.weight
                    if self.values:
                        values[self.values][start:stop] = group.label
                    extend_range(values[self.ranges][group.slot], start, stop)
            if self.groups:
                self._upload_group(values, at, group, group_spans)
            if self.teacher:
                assert group.teacher is not None, "what the teacher says is not known"
                start, stop = group_spans[0]
                self.teacher.fill(values, start, stop, group.teacher)
            if self.inputs:
                assert group.inputs is not None, "the inputs of the group's tokens are not known"
                start, stop = group_spans[0]
                values[self.inputs][start:stop] = group.inputs
        for tensor, array in values.items():
            device.write(tensor.storage.buffer, array)

    def _upload_group(self, values: dict[Tensor, np.ndarray], at: int, group: Group, group_spans: np.ndarray) -> None:
        assert self.groups is not None
        tensors = self.groups
        values[tensors.members][at] = group_spans
        values[tensors.starts][at] = group_spans[:, 0]
        if group.prompt_targets:
            values[tensors.members][at][:, 0] += np.array(group.prompt_targets, np.uint32)
        values[tensors.weights][at], values[tensors.values][at] = group.weight, group.label
        values[tensors.shared][at] = group.kl_estimate
        if tensors.reference:
            assert group.reference is not None, "the group's reference is not known"
            values[tensors.reference][at] = group.reference
        extend_range(values[tensors.ranges][group.slot], at, at + 1)


@dataclass(frozen=True)
class Score:
    """The result of an objective for a batch.

    weights f32 [R]: weight of each target token's -log p at the objective's first temperature in the step's loss, i.e.
    the loss's derivative by it; 0 for tokens of other objectives. losses f32, by token [R] or by group [G] (the
    objective's unit): their sum over a step, divided by the number of units, is the step's loss; likewise `metrics`, by
    name, or their largest value. tail_logprobs, token_logprobs: the derivatives of a loss that depends on a teacher's
    support (see `ops.loss.loss.VocabularyGradient`), instead of weights.
    """

    weights: Tensor | None
    losses: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    tail_logprobs: Mapping[float, Tensor] = field(default_factory=dict)
    token_logprobs: Mapping[Tensor, Tensor] = field(default_factory=dict)


WIDTH, HIGHEST_RATE = 4096, 1e-3


@dataclass(frozen=True)
class Objective:
    """A training objective: a frozen dataclass whose fields are the training options that it reads, and its own
    (`own_option`).

    formats: the rows that it reads, by their columns; by default those that are one example.
    unit: what the loss is averaged over. rows_per_sample: examples per sample, which stay in one batch. reference:
    whether it needs the log-probabilities of its answers under a frozen reference: the base model alone, or another
    adapter. trains_prompt: whether it also needs the log-probabilities of the first example's prompt. needs_kl_rows:
    whether it needs those of prompts with other samples' answers (`Objective.estimate`). has_labels: whether it reads
    the value of each token's row (`Sample.value`). needs_teacher: whether it needs a teacher. samples: whether rows
    are prompts, whose completions it samples itself. needs_entropy: whether it
    reads what entropies need of it (`VocabularyLogprobs.states`). token_inputs: numbers that it reads of each token
    (`Group.inputs`). metrics: values logged beside the loss; maxima: those that are largest values and no sums;
    progress_metrics: those that are shown with each step, by default all.
    learning_rate: the peak by default, of a model of WIDTH.
    """

    formats: ClassVar[RowFormats[Sample]] = EXAMPLES
    unit: ClassVar[Literal["token", "group"]] = "token"
    rows_per_sample: ClassVar[int] = 1
    reference: ClassVar[bool] = False
    trains_prompt: ClassVar[bool] = False
    has_labels: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = False
    samples: ClassVar[bool] = False
    needs_entropy: ClassVar[bool] = False
    token_inputs: ClassVar[int] = 0
    metrics: ClassVar[tuple[str, ...]] = ()
    maxima: ClassVar[tuple[str, ...]] = ()
    progress_metrics: ClassVar[tuple[str, ...] | None] = None
    learning_rate: ClassVar[float] = 2e-4

    @classmethod
    def default_rate(cls, width: int) -> float:
        """The peak learning rate by default for a model whose hidden states have `width` values.

        2e-4 at 4096, as QLoRA (Dettmers et al. 2023, table 9), and inversely proportional to the width, as for hidden
        matrices in muP (Yang et al. 2022), up to 1e-3; docs/defaults.md has what was measured.
        """
        return min(HIGHEST_RATE, cls.learning_rate * WIDTH / width)

    @property
    def needs_kl_rows(self) -> bool:
        return False

    @property
    def support(self) -> int:
        """K: a teacher's tokens with the largest logits per target that the objective compares; 0 without a teacher."""
        return 0

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Of the softmaxes of the logits that the objective needs."""
        return (1.0,)

    @property
    def precomputes(self) -> bool:
        """Whether the reference is computed before training instead of in every step."""
        return False

    @property
    def reference_path(self) -> str | None:
        """Directory of the adapter that is the reference; None for the base model alone."""
        return None

    def idle(self) -> dict[str, str]:
        """Options of its own that do nothing beside the others, and why."""
        return {}

    def cut(self) -> Cut | None:
        """How rows longer than the maximum length are cut; None cuts them at the end."""
        return None

    def shared(self, samples: Sequence[Sequence[Row]]) -> float:
        """`Group.shared` of a step with these samples."""
        return 0.0

    def estimate(self, policy: Sequence[float], reference: Sequence[float]) -> float:
        """`Group.shared` of a step, from the log-probabilities of its mismatched answers."""
        raise NotImplementedError

    def has_reference(self, group: Group) -> bool:
        """Whether the group has what `referenced` adds, or needs none."""
        return not self.reference or group.reference is not None

    def referenced(self, group: Group, logprobs: Sequence[np.ndarray]) -> Group:
        """The group with the log-probabilities of its answers' tokens under the reference."""
        return replace(group, reference=self.sums(logprobs))

    def sums(self, logprobs: Sequence[np.ndarray]) -> tuple[float, ...]:
        """The log-probabilities of a group's answers under the reference, given those of their tokens."""
        return tuple(float(values.sum(dtype=np.float64)) for values in logprobs)

    def logged(self, totals: Mapping[str, float], units: int) -> dict[str, float]:
        """The logged metrics, given their sums over a step or over the held-out rows."""
        return {name: value / units for name, value in totals.items()}

    def score(self, rec: Recorder, logprobs: Tensor, scoring: Scoring) -> Score:
        """Record the computation of weights and losses from log-probabilities f32 [R]."""
        raise NotImplementedError

    def score_vocabulary(self, rec: Recorder, vocabulary: VocabularyLogprobs, scoring: Scoring) -> Score:
        """The same from all that the pass gives, for objectives with a `support`."""
        return self.score(rec, vocabulary.logprobs, scoring)
