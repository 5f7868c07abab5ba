"""Steps over completions: which prompts are sampled together, and which completions form which optimizer step.

As in TRL, the completions of a phase are sampled at its beginning and divided among its steps, which are taken
`num_iterations` times. All but the completions is a pure function of lengths and options.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np

from wgpu_lora.data import TokenizedData, pack
from wgpu_lora.data.packing import epoch_order
from wgpu_lora.errors import UserError
from wgpu_lora.files.typed_json import Count, FromJson, typed
from wgpu_lora.models.batch_inputs import Segment
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.names.text import count_noun
from wgpu_lora.train.objectives import OBJECTIVES
from wgpu_lora.train.objectives.grpo import GRPO, KEPT, OLD
from wgpu_lora.train.objectives.objective import Group
from wgpu_lora.train.options.training_arguments import ROWS_PER_BATCH, TrainingArguments
from wgpu_lora.train.session.data_stream import DataStream, Step, quarters
from wgpu_lora.train.session.session import Sampling

PROMPTS = 4  # of an optimizer step by default
SEQUENCES = 32  # that are sampled together, at most
UNTRAINED = -100


@dataclass(frozen=True)
class Completion:
    """What was sampled for a prompt.

    sample: the prompt, a position in the data. token_ids: with the stop token. logprobs, entropies: of each sampled
    token when it was. stopped: whether it ended by itself, and not by its length. tool_mask: 1 for each token that was
    sampled, and 0 for those of tools' results; empty if all were.
    """

    sample: Count
    token_ids: list[Count]
    logprobs: list[float]
    entropies: list[float]
    stopped: bool
    advantage: float = 0.0
    tool_mask: list[Count] = field(default_factory=list)

    @property
    def sampled(self) -> np.ndarray:
        """Whether each token was sampled, bool [tokens]."""
        return np.array(self.tool_mask or [1] * len(self.token_ids), bool)

    @property
    def size(self) -> int:
        """Tokens that were sampled."""
        return len(self.logprobs)

    @classmethod
    def from_json(cls, value: Any) -> Completion:
        result: Completion = typed(cls, value, "the completion", unknown="refuse")
        sampled = result.sampled
        if len(sampled) != len(result.token_ids) or not sampled.sum() == result.size == len(result.entropies):
            raise ValueError("a completion has lists of other lengths")
        return result


@dataclass(frozen=True)
class Phase:
    """The completions that were sampled at the beginning of step `start` of an epoch, and what is logged of them."""

    epoch: Count
    start: Count
    completions: list[Annotated[Completion, FromJson()]]
    metrics: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, value: Any) -> Phase:
        """Raises ValueError."""
        result: Phase = typed(cls, value, "the phase", unknown="refuse")
        return result


@dataclass
class RolloutStream(DataStream):
    """A stream whose samples are prompts. A step's completions are those of `phase`, which whoever samples sets."""

    phase: Phase | None = None
    _trained: list[Completion] | None = None  # of the groups that were made last
    _skipped: list[Completion] = field(default_factory=list)  # then, since they have no gradient

    @property
    def policy(self) -> GRPO:
        assert isinstance(self.objective, GRPO)
        return self.objective

    # -- sizes -----------------------------------------------------------------------------------------------------

    @property
    def parts(self) -> int:
        """Optimizer steps that a phase's completions are divided among."""
        _, _, batches = self.args.batching
        return (self.policy.steps_per_generation or batches) // batches

    @property
    def phase_steps(self) -> int:
        return self.parts * self.policy.num_iterations

    @property
    def skips_zero_advantages(self) -> bool:
        """Whether completions with advantage 0 need no pass: they have no gradient, and sampling gave their metrics."""
        return self.phase_steps == 1 and not self.policy.kl_coefficient

    @property
    def prompts(self) -> int:
        """Prompts of a phase."""
        _, rows, batches = self.args.batching
        return rows * batches * self.parts // self.policy.num_generations

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each prompt with the longest completion."""
        return [len(row.input_ids) + self.policy.max_completion_length for row in self.prepared.rows]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with the longest completion."""
        return max(self.lengths)

    @property
    def sampling(self) -> Sampling:
        """The sizes of the engine that samples."""
        sequences = min(SEQUENCES, self.prompts * self.policy.num_generations)
        return Sampling(sequences, self.longest, self.policy.temperature)

    def buckets(self) -> list[int]:
        return quarters(self.args.batching[1] * self.longest)

    def check(self, positions: int) -> None:
        """Raise UserError if the model has too few positions, or the sizes of batches do not match."""
        if self.longest > positions:
            prompt = self.longest - self.policy.max_completion_length
            raise UserError(
                f"The longest prompt has {prompt:,} tokens, which leaves no room for completions of "
                f"{self.policy.max_completion_length:,} in the model's {positions:,} positions: lower "
                f"{flag('max_completion_length')} or {flag('max_length')}."
            )
        _, rows, batches = self.args.batching
        together, of = self.policy.steps_per_generation or batches, self.policy.num_generations
        if together % batches:
            raise UserError(
                f"{setting('steps_per_generation', together)} must be a multiple of "
                f"{setting('gradient_accumulation_steps', batches)}: change one of them."
            )
        if rows * together % of:
            raise UserError(
                f"{rows * together:,} completions that are sampled together ({flag('per_device_train_batch_size')} "
                f"times {flag('steps_per_generation')}) must be a multiple of {setting('num_generations', of)}: change "
                "one of them."
            )
        if self.prompts > len(self.prepared.samples):
            raise UserError(
                f"{count_noun(self.prompts, 'prompt')} are sampled together, but the data have "
                f"{len(self.prepared.samples):,}: lower {flag('gradient_accumulation_steps')} or "
                f"{flag('steps_per_generation')}, or give more data."
            )

    # -- steps -----------------------------------------------------------------------------------------------------

    def epoch(self, number: int) -> list[list[list[int]]]:
        """The optimizer steps of an epoch, each with the prompts of its phase; as in TRL, prompts that do not fill a
        phase are left out."""
        if number not in self._epochs:
            order = epoch_order(len(self.prepared.samples), self.args.seed, number, self.args.shuffle).tolist()
            size = self.prompts
            phases = [order[i : i + size] for i in range(0, len(order) - size + 1, size)]
            self._epochs = {number: [[prompts] for prompts in phases for _ in range(self.phase_steps)]}
        return self._epochs[number]

    def step_before(self, epoch: int, index: int) -> Step | None:
        return None  # its completions may be gone

    def start_of(self, step: Step) -> int:
        """The index of the first step of the phase."""
        return step.index - step.index % self.phase_steps

    def has_phase(self, step: Step) -> bool:
        return self.phase is not None and (self.phase.epoch, self.phase.start) == (step.epoch, self.start_of(step))

    def completions_of(self, step: Step) -> list[Completion]:
        """Those that a step trains on; shuffled if there are several parts, so that each has some of all prompts."""
        assert self.phase is not None
        assert self.has_phase(step), "the step's completions have not been sampled"
        completions, parts = self.phase.completions, self.parts
        if parts == 1:
            return completions
        order = epoch_order(len(completions), self.args.seed, self.phase.epoch * len(completions) + self.phase.start)
        return [completions[i] for i in np.array_split(order, parts)[step.index % parts]]

    def groups(self, step: Step, slot: int = 0) -> list[list[Group]]:
        """The micro-batches of a step. How completions are packed into them changes nothing but rounding."""
        assert self.phase is not None
        policy, completions = self.policy, self.completions_of(step)

        def trained(completion: Completion) -> bool:
            return bool(completion.token_ids) and (completion.stopped or not policy.mask_truncated_completions)

        lengths = [completion.size * trained(completion) for completion in completions]
        together = sum(completion.size for completion in self.phase.completions if trained(completion))
        weights = policy.completion_weights(lengths, together, self.parts)
        pairs = [
            (completion, float(weight))
            for completion, weight in zip(completions, weights, strict=True)
            if trained(completion)
        ]
        masks = policy.token_masks([np.array(completion.entropies) for completion, _ in pairs])
        result, self._trained, self._skipped = [], [], []
        for (completion, weight), mask in zip(pairs, masks, strict=True):
            if self.skips_zero_advantages and completion.advantage == 0:
                self._skipped.append(completion)
            else:
                self._trained.append(completion)
                result.append(self._group(completion, weight, mask, slot, step.epoch))
        sizes = [group.tokens for group in result]
        return [[result[i] for i in batch] for batch in pack(sizes, range(len(sizes)), self.buckets()[-1])]

    def _group(self, completion: Completion, weight: float, mask: np.ndarray, slot: int, epoch: int) -> Group:
        [segment], index = self.segments([completion], slot), self.prepared.samples[completion.sample][0].index
        inputs = np.zeros((completion.size, self.policy.token_inputs), np.float32)
        inputs[:, OLD], inputs[:, KEPT] = completion.logprobs, mask
        if self.args.lora_dropout:
            segment = replace(segment, draws=self._keys(epoch, index, len(segment.input_ids)))
        return Group((segment,), slot, weight, completion.advantage, index=index, inputs=inputs)

    def segments(self, completions: Sequence[Completion], slot: int) -> list[Segment]:
        """Completions with their prompts; the targets are the tokens that were sampled."""
        result = []
        for completion in completions:
            prompt = self.prepared.samples[completion.sample][0].input_ids
            answer = np.array(completion.token_ids, np.int32)
            targets = np.where(completion.sampled, answer, UNTRAINED).astype(np.int32)
            labels = np.concatenate([np.full(len(prompt), UNTRAINED, np.int32), targets])
            result.append(Segment(np.concatenate([prompt, answer]), labels, slot))
        return result

    def trained_tokens(self, samples: Iterable[int]) -> int:
        """Of the groups that were made last."""
        return sum(completion.size for completion in self._trained or [])

    def processed_tokens(self, samples: Iterable[int]) -> int:
        """Of the groups that were made last; before the first, the most that a step may have."""
        prompts = self.prepared.samples
        if self._trained is None:
            longest = sum(len(prompts[sample][0].input_ids) + self.policy.max_completion_length for sample in samples)
            return longest * self.policy.num_generations // self.parts
        return sum(
            len(prompts[completion.sample][0].input_ids) + len(completion.token_ids) for completion in self._trained
        )

    def units(self, samples: Sequence[int]) -> int:
        return 1  # losses are weighted

    def step_metrics(self, totals: Mapping[str, float], units: int) -> dict[str, float]:
        """Metrics of sampling, and those of the loss over all completions, of skipped ones as sampling gave them."""
        assert self.phase is not None
        tokens = sum(completion.size for completion in self._skipped)
        entropy = sum(sum(completion.entropies) for completion in self._skipped)
        skipped = {"tokens": tokens, "sequences": len(self._skipped), "entropy": entropy}
        sums = {name: totals[name] + value for name, value in skipped.items()}
        return self.phase.metrics | super().step_metrics({**totals, **sums, "skipped_tokens": tokens}, units)


def stream_of(prepared: TokenizedData, args: TrainingArguments) -> DataStream:
    """The stream of some data, as the objective reads them."""
    return (RolloutStream if OBJECTIVES[args.objective].samples else DataStream)(prepared, args)


def completion_batches(args: TrainingArguments, generations: int, prompts: int) -> TrainingArguments:
    """Fill in the sizes of batches where unset: ROWS_PER_BATCH completions, in steps of PROMPTS prompts or, if the data
    have fewer, of all."""
    rows = args.per_device_train_batch_size or ROWS_PER_BATCH
    batches = args.gradient_accumulation_steps or max(1, min(PROMPTS, prompts) * generations // rows)
    return replace(args, packing=False, per_device_train_batch_size=rows, gradient_accumulation_steps=batches)
