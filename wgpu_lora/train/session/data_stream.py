"""Which samples go into which optimizer step: a pure function of lengths and options, so that resuming is exact."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from wgpu_lora.data import Row, TokenizedData, batches, epoch_order
from wgpu_lora.data.tokenized_data import prompt_tokens
from wgpu_lora.models.batch_inputs import Segment
from wgpu_lora.train.distill.teacher_cache import TeacherCache, cached_rows
from wgpu_lora.train.objectives import objective_of
from wgpu_lora.train.objectives.objective import Group, Objective
from wgpu_lora.train.options.training_arguments import TrainingArguments


@dataclass(frozen=True)
class Step:
    """One optimizer step: its micro-batches as positions in Prepared.samples."""

    epoch: int
    index: int  # within the epoch
    last_of_epoch: bool
    micro_batches: list[list[int]]

    @property
    def samples(self) -> list[int]:
        """The samples of all micro-batches."""
        return [sample for batch in self.micro_batches for sample in batch]


@dataclass
class DataStream:
    """The steps of every epoch of one adapter's data."""

    prepared: TokenizedData
    args: TrainingArguments
    _epochs: dict[int, list[list[list[int]]]] = field(default_factory=dict)
    _total: int | None = None  # cached, since counting steps packs every epoch
    _digest: str | None = None  # cached, since every checkpoint stores it
    references: dict[int, tuple[float, ...]] = field(default_factory=dict)  # of samples, if they are kept

    @cached_property
    def objective(self) -> Objective:
        return objective_of(self.args)

    @cached_property
    def teacher(self) -> TeacherCache | None:
        """The cache of the teacher's logits, if the objective has a teacher."""
        args = self.args
        return TeacherCache.open(args.teacher_cache) if args.objective == "kd" and args.teacher_cache else None

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each sample in a batch."""
        return group_lengths(self.prepared)

    def epoch(self, number: int) -> list[list[list[int]]]:
        """The optimizer steps of an epoch; the last may have fewer micro-batches."""
        if number not in self._epochs:
            args = self.args
            packing, rows, group = args.batching
            order = epoch_order(len(self.lengths), args.seed, number, args.shuffle)
            longest = args.length * self.objective.rows_per_sample
            result = batches(self.lengths, order.tolist(), batch_size=rows, max_length=longest, packing=packing)
            self._epochs = {number: [result[i : i + group] for i in range(0, len(result), group)]}
        return self._epochs[number]

    def total_steps(self) -> int:
        """Total steps of the run, by --max-steps or else by --num-train-epochs."""
        if self._total is None:
            self._total = self.args.max_steps if self.args.max_steps > 0 else self._count_steps()
        return self._total

    def _count_steps(self) -> int:
        epochs = math.floor(self.args.num_train_epochs)
        part = self.args.num_train_epochs - epochs
        total = sum(len(self.epoch(e)) for e in range(epochs))
        # 3.2 epochs of 30 steps are 96, though 3.2 - 3 is more than a fifth in binary.
        return max(1, total + (math.ceil(round(part * len(self.epoch(epochs)), 6)) if part else 0))

    def steps(self, epoch: int = 0, index: int = 0) -> Iterator[Step]:
        """Steps from a position on, without end; the caller decides when to stop."""
        while True:
            result = self.epoch(epoch)
            for i in range(index, len(result)):
                yield Step(epoch, i, i == len(result) - 1, result[i])
            epoch, index = epoch + 1, 0

    def position(self, steps: int) -> tuple[int, int]:
        """(epoch, index) of the step that follows `steps` steps."""
        epoch = 0
        while steps >= len(self.epoch(epoch)):
            steps -= len(self.epoch(epoch))
            epoch += 1
        return epoch, steps

    def step_before(self, epoch: int, index: int) -> Step | None:
        """The step before a position; None at the beginning."""
        if not index:
            if not epoch:
                return None
            epoch, index = epoch - 1, len(self.epoch(epoch - 1))
        result = self.epoch(epoch)
        return Step(epoch, index - 1, index == len(result), result[index - 1])

    def trained_tokens(self, samples: Iterable[int]) -> int:
        """Number of trained tokens."""
        return sum(row.trained_tokens for sample in samples for row in self.prepared.samples[sample])

    def processed_tokens(self, samples: Iterable[int]) -> int:
        """Number of tokens, including prompts. Each counts once, also if a reference passes over it, too, so that
        tokens/s tell which way to compute the reference is faster."""
        return sum(self.lengths[sample] for sample in samples)

    def units(self, samples: Sequence[int]) -> int:
        """Number of tokens or groups that the loss of these samples is averaged over."""
        return self.trained_tokens(samples) if self.objective.unit == "token" else len(samples)

    def step_metrics(self, totals: Mapping[str, float], units: int) -> dict[str, float]:
        """What is logged of a step beside its loss, given the sums of the objective's metrics over `units`."""
        return self.objective.logged(totals, units)

    def groups(self, step: Step, slot: int = 0) -> list[list[Group]]:
        """The micro-batches of a step, weighted so that their losses sum to its mean."""
        weight = 1 / self.units(step.samples)
        return self._groups_of(step.micro_batches, weight, slot, step.epoch)

    def part(self, step: Step, begin: int, end: int, slot: int = 0) -> list[list[Group]]:
        """Those groups of a step whose samples are [begin, end) of `Step.samples`, in their micro-batches."""
        weight = 1 / self.units(step.samples)
        return self._groups_of(step.micro_batches, weight, slot, step.epoch, set(step.samples[begin:end]))

    def heldout_groups(self, batches: Sequence[Sequence[int]], slot: int) -> list[list[Group]]:
        """Batches of samples as groups of weight 1, without dropout."""
        return self._groups_of(batches, 1.0, slot, None)

    def _groups_of(
        self,
        batches: Sequence[Sequence[int]],
        weight: float,
        slot: int,
        epoch: int | None,
        selection: Collection[int] | None = None,
    ) -> list[list[Group]]:
        """selection: samples of which groups are made; the others are only what those are compared with."""
        order = [sample for batch in batches for sample in batch]
        shared = self.objective.shared([self.prepared.samples[sample] for sample in order])
        before = dict(zip(order, order[-1:] + order[:-1], strict=True))
        if len(order) == 1:  # no other sample in the step has an answer
            before = {order[0]: (order[0] + 1) % len(self.prepared.samples)}

        def group(sample: int) -> Group:
            result = replace(self.group(sample, weight, slot, epoch), kl_estimate=shared)
            return replace(result, kl_row=self._mismatched(sample, before[sample], slot)) if mismatched else result

        mismatched = self.objective.needs_kl_rows
        subsets = [[sample for sample in batch if selection is None or sample in selection] for batch in batches]
        return [[group(sample) for sample in batch] for batch in subsets if batch]

    def group(self, sample: int, weight: float, slot: int, epoch: int | None = None) -> Group:
        """A sample as a group of a batch; `epoch` keys its dropout, None turns dropout off."""
        rows, whole = self.prepared.samples[sample], self.objective.trains_prompt
        prefixes = [0] * (len(rows) - 1) + [self.prepared.prefixes[sample]]
        labels = [row.input_ids if whole and not number else row.labels for number, row in enumerate(rows)]
        context = tuple(prompt_targets(row.labels) if whole and not number else 0 for number, row in enumerate(rows))
        result = zip(rows, labels, self._draws(epoch, rows), prefixes, strict=True)
        segments = [
            Segment(row.input_ids, row_labels, slot, draws, prefix) for row, row_labels, draws, prefix in result
        ]
        value, reference, index = self.prepared.value(sample), self.references.get(sample), rows[0].index
        teacher = None
        if self.teacher:
            teacher = cached_rows(self.teacher, labels[0], index, self.objective.temperatures[-1])
        return Group(
            tuple(segments), slot, weight, value, reference, prompt_targets=context, index=index, teacher=teacher
        )

    def _mismatched(self, sample: int, answer_sample: int, slot: int) -> Segment:
        """The prompt of a sample with the answer of another, cut to the maximum length."""
        question, answered = self.prepared.samples[sample][0], self.prepared.samples[answer_sample][0]
        prompt, behind = prompt_tokens(question.labels), prompt_tokens(answered.labels)
        length = self.args.length
        ids = np.concatenate([question.input_ids[:prompt], answered.input_ids[behind:]])[:length]
        labels = np.concatenate([question.labels[:prompt], answered.labels[behind:]])[:length]
        return Segment(ids, labels, slot)

    @cached_property
    def longest_mismatched(self) -> int:
        """Tokens of the longest prompt with the longest answer; 0 if the objective asks for no such rows."""
        if not self.objective.needs_kl_rows:
            return 0
        prompts = [prompt_tokens(row.labels) for row in self.prepared.rows]
        answers = [len(row.labels) - prompt for row, prompt in zip(self.prepared.rows, prompts, strict=True)]
        return min(self.args.length, max(prompts) + max(answers))

    @property
    def longest(self) -> int:
        """Tokens of the longest row that a pass of any kind computes, which tables of positions must hold."""
        return max(*self.prepared.lengths, self.longest_mismatched)

    def _draws(self, epoch: int | None, rows: Sequence[Row]) -> list[np.ndarray | None]:
        """Dropout keys of each row of a sample, the same at the same position, so that a common prompt has the same."""
        if epoch is None or not self.args.lora_dropout:
            return [None] * len(rows)
        return [self._keys(epoch, rows[0].index, len(row.input_ids)) for row in rows]

    def _keys(self, epoch: int, row: int, length: int) -> np.ndarray:
        """Dropout keys, a function of seed, epoch, row and token only, so that packing does not change them."""
        p = self.args.lora_dropout
        keys = np.random.SeedSequence([self.args.seed, epoch, row]).generate_state(2)
        draws = np.empty((length, 4), np.uint32)
        draws[:, 0] = keys[0]
        draws[:, 1] = keys[1] + np.arange(length, dtype=np.uint32)
        draws[:, 2] = int(p * 2**32)
        draws[:, 3] = np.float32(1 / (1 - p)).view(np.uint32)
        return draws

    def rows_digest(self) -> str:
        """SHA-256 of the encoded rows, which covers the data, the tokenizer and the chat template."""
        if self._digest is None:
            self._digest = self._hash_rows()
        return self._digest

    def _hash_rows(self) -> str:
        digest = hashlib.sha256()
        for row in self.prepared.rows:
            digest.update(np.array([row.index, len(row.input_ids)], np.int64).tobytes())
            digest.update(row.input_ids.tobytes() + row.labels.tobytes())
        digest.update(np.array(self.prepared.values, np.float64).tobytes())
        return digest.hexdigest()

    # -- shapes ----------------------------------------------------------------------------------------------------

    def buckets(self) -> list[int]:
        """Batch sizes in tokens to record programs for, ascending; every batch fits the last."""
        lengths = sorted(self.lengths)
        packing, rows, _ = self.args.batching
        if packing:
            return [_rounded(min(rows * self.args.length * self.objective.rows_per_sample, sum(lengths)))]
        return quarters(sum(lengths[-rows:]))


def group_lengths(prepared: TokenizedData) -> list[int]:
    """Tokens of each sample in a batch."""
    return [prepared.tokens(sample) for sample in range(len(prepared.samples))]


def prompt_targets(labels: np.ndarray) -> int:
    """The number of targets before the first trained one, if all tokens but the first are targets."""
    return prompt_tokens(labels[1:])


def quarters(maximum: int) -> list[int]:
    """Up to four batch sizes, ascending, so that smaller batches cost less."""
    return sorted({_rounded(maximum * share // 4) for share in (1, 2, 3, 4)})


def _rounded(tokens: int) -> int:
    """Rounded up to whole tiles of the matrix products."""
    return max(16, -(-tokens // 16) * 16)


def heldout_options(args: TrainingArguments) -> TrainingArguments:
    """The options of a stream of held-out rows."""
    eval_cache = args.eval_teacher_cache
    return (
        replace(args, teacher_cache=eval_cache, eval_teacher_cache=None)
        if args.objective == "kd" and eval_cache
        else args
    )
