"""The programs and buffers of a training run, whose memory is known to the byte before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wgpu_lora.data import pack
from wgpu_lora.events import SILENT, Evaluating, Events
from wgpu_lora.formats.peft_adapter import PARTS, Matrices
from wgpu_lora.gpu.arena_plan import total_by_group
from wgpu_lora.gpu.device_errors import with_option_advice
from wgpu_lora.gpu.memory_leases import claim, is_unified
from wgpu_lora.gpu.program import Arena, Program, allocate, release
from wgpu_lora.gpu.tensor import Storage
from wgpu_lora.gpu.tiling_check import check_tilings
from wgpu_lora.gpu.tuning_cache import NO_CHOICES, Choices
from wgpu_lora.gpu.verdicts import verdicts_of
from wgpu_lora.infer.engine import Engine
from wgpu_lora.models.adapter_set import AdapterSet, Norms, SlotSpec, fix_gains
from wgpu_lora.models.batch_inputs import Segment, Tables
from wgpu_lora.models.loaded_model import LoadedModel, staging_bytes
from wgpu_lora.models.parameters import ParameterSet
from wgpu_lora.models.scoring import Scorer
from wgpu_lora.ops.activation_storage import IN_F32, Saving
from wgpu_lora.train.memory import MemoryPlan
from wgpu_lora.train.objectives import objective_of
from wgpu_lora.train.objectives.objective import Group, Objective
from wgpu_lora.train.optimizers.update_rule import UpdateRule
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.session.batch import Batch, Totals
from wgpu_lora.train.session.data_stream import DataStream
from wgpu_lora.train.session.live_teachers import LiveTeacher, Teachers
from wgpu_lora.train.session.optimizer_update import Optimizer

ADVISED = ("per_device_train_batch_size", "max_length")  # if a plan exceeds the device's limits


@dataclass(frozen=True)
class Sampling:
    """The sizes of an engine that samples completions.

    sequences: that run together. tokens: of the longest, with its prompt. temperature: of log-probabilities.
    """

    sequences: int
    tokens: int
    temperature: float


GROUPS = ("base", "adapters", "reference", "optimizer", "activations", "workspace")


class Session:
    """The programs of a run: forward and backward passes for each bucket of tokens, the update, and held-out loss.

    Args:
        trained: the parameters of all slots.
        buckets: batch sizes in tokens to record, ascending.
        objectives: one per slot; None is the default objective.
        optim: the optimizer; AdamW if not given.
        eval_tokens: tokens of a held-out batch, 0 for none.
        references: frozen adapters that objectives compare theirs with, by slot of `adapters`; a slot without one is
            compared with the base model alone.
        teachers: models that objectives learn from, by slot.
        mismatched: tokens of the longest mismatched row (`DataStream.longest_mismatched`), 0 if there are none.
        positions: tokens of the longest row of any pass (`DataStream.longest`).
        sampling: what completions are sampled with, None for no sampling.
        compute_dtype: type that the inputs of frozen matmuls are rounded to (see ops.half_precision).
        saving: how activations are stored for the backward pass.
    """

    @with_option_advice(*ADVISED)
    def __init__(
        self,
        model: LoadedModel,
        trained: ParameterSet,
        buckets: list[int],
        *,
        positions: int,
        dropout: bool = False,
        recompute: bool = False,
        eval_tokens: int = 0,
        compute_dtype: str = "f32",
        saving: Saving = IN_F32,
        objectives: Sequence[Objective] | None = None,
        optim: UpdateRule | None = None,
        references: Mapping[int, SlotSpec] | None = None,
        mismatched: int = 0,
        teachers: Mapping[int, LiveTeacher] | None = None,
        sampling: Sampling | None = None,
    ):
        self.model = model
        self.compute_dtype = compute_dtype
        self.trained = trained
        self.device = device = model.device
        if saving.offload:
            device.check_host_buffers()
        slot_objectives = objectives or [objective_of(TrainingArguments())] * trained.slots
        self.totals = Totals(slot_objectives)
        self.optimizer = Optimizer(device, trained, self.totals.loss, optim)
        self.tables = Tables.declare(model.config.tables(), positions)

        def batch(tokens: int, **options: Any) -> Batch:
            shared = self.totals, self.tables
            return Batch(model, trained, tokens, slot_objectives, *shared, compute_dtype=compute_dtype, **options)

        self.steps = {tokens: batch(tokens, dropout=dropout, recompute=recompute, saving=saving) for tokens in buckets}
        self.heldout = batch(eval_tokens, training=False) if eval_tokens else None
        self._objectives = slot_objectives
        self._record_scorers(references or {}, mismatched)
        frozen = isinstance(trained, AdapterSet)
        self.norms = Norms(model, trained) if isinstance(trained, AdapterSet) and trained.gains else None
        sizes = [*self.steps, *([eval_tokens] if eval_tokens else [])]
        self.teachers = Teachers(model, teachers or {}, sizes, positions, self.tables, compute_dtype, frozen)
        self.engine: Engine | None = None  # samples completions, with the adapters in training
        if sampling:
            self.engine = Engine(
                model, adapters=self.adapters, max_model_len=sampling.tokens, max_num_seqs=sampling.sequences,
                temperature=sampling.temperature, plan_only=True,
            )  # fmt: skip
        self.built: set[int] = set()
        self.choices = NO_CHOICES
        self._claim = ExitStack()
        self.arena: Arena | None = None

    def _record_scorers(self, references: Mapping[int, SlotSpec], mismatched: int) -> None:
        """The programs of frozen passes, if an objective needs them."""
        self.references: AdapterSet | None = None
        self.frozen: Scorer | None = None
        self.current: Scorer | None = None  # of the adapters in training
        self._frozen_slots: dict[int | None, int] = {slot: number for number, slot in enumerate(references)}
        if references:
            specs, limit = list(references.values()), self.device.max_binding
            self.references = AdapterSet.declare(self.model.config, specs, limit, "reference")
        sizes, settings = [*self.steps], (self.tables, self.compute_dtype)
        longest = [self.heldout.tokens] if self.heldout else []
        if any(objective.reference for objective in self._objectives):
            buckets = [*sizes, *longest, *([mismatched] if mismatched > max([*sizes, *longest]) else [])]
            degrees = sorted({o.temperatures[0] for o in self._objectives if o.reference})
            self.frozen = Scorer(self.model, self.references, buckets, *settings, "reference", degrees)
        if any(objective.needs_kl_rows for objective in self._objectives):
            bucket = max([mismatched, *sizes, *longest])
            self.current = Scorer(self.model, self.trained, [bucket], *settings, "mismatched")

    @property
    def adapters(self) -> AdapterSet:
        """The trained adapters; None if other parameters are trained."""
        assert isinstance(self.trained, AdapterSet)
        return self.trained

    def _scorers(self) -> list[Scorer]:
        return [scorer for scorer in (self.frozen, self.current) if scorer]

    # -- memory ----------------------------------------------------------------------------------------------------

    def programs(self) -> list[Program]:
        programs = [batch.program for batch in self.steps.values()]
        frozen = [program for scorer in self._scorers() for program in scorer.programs()]
        programs += [self.norms.program] if self.norms else []
        frozen += self.teachers.programs()
        return [*programs, self.optimizer.program, *([self.heldout.program] if self.heldout else []), *frozen]

    def storages(self) -> set[Storage]:
        result = self.model.decoder.storages() | self.trained.storages() | self.optimizer.storages()
        batches = [*self.steps.values(), *([self.heldout] if self.heldout else [])]
        frozen = self.references.storages() if self.references else set()
        scorers = (scorer.storages() for scorer in self._scorers())
        result |= self.norms.program.persistent_storages() if self.norms else set()
        result |= self.engine.storages() if self.engine else set()
        shared = self.totals.storages() | frozen | self.teachers.storages()
        return result.union(shared, *(batch.storages() for batch in batches), *scorers)

    def _arena_sizes(self, on_host: bool = False) -> list[int]:
        sampling = self.engine.all_programs() if self.engine else []  # never beside a step, so the larger is planned
        return Arena.sizes_for([program.plan(on_host) for program in (*self.programs(), *sampling)])

    @with_option_advice(*ADVISED)
    def memory(self) -> MemoryPlan:
        """The exact bytes of every buffer that `allocate` creates. Raises UserError if a tensor cannot be bound."""
        groups = dict.fromkeys(GROUPS, 0) | total_by_group(self.storages())
        groups["activations"] += sum(self._arena_sizes())
        model, teachers = self.model.decoder, self.teachers
        weights = total_by_group(model.storages())["base"] + teachers.base_bytes()
        loading = weights + max(staging_bytes(model), teachers.staging_bytes())
        host, unified = sum(self._arena_sizes(on_host=True)), is_unified(self.device.info)
        return MemoryPlan(groups, loading, host, unified)

    def needs(self) -> int:
        """Maximum bytes that `allocate` adds to the memory that the device uses."""
        plan, teachers = self.memory(), self.teachers
        loaded_bytes = (plan.groups["base"] if self.model.weights_loaded else 0) + teachers.base_bytes(on_device=True)
        whole = self.model.weights_loaded and all(model.weights_loaded for model in teachers.models)
        return (plan.device_bytes if whole else plan.peak_device_bytes) - loaded_bytes

    # -- run -------------------------------------------------------------------------------------------------------

    @with_option_advice(*ADVISED)
    def allocate(self, events: Events = SILENT, choices: Choices = NO_CHOICES) -> None:
        """Load the base, then create all other buffers; the programs are built with the tilings in `choices`.

        Raises:
            UserError: the memory is in use, or the device gets a kernel wrong in all tilings.
        """
        self.choices = choices
        self._claim.enter_context(claim(self.device, self.needs(), "a training step"))
        self._claim.enter_context(verdicts_of(self.device).reported_to(events))
        check_tilings(self.device, self.programs(), choices)
        self.model.load_weights(events)
        self.teachers.load(events)
        allocate(self.device, self.storages())
        self.arena = Arena(self.device, self._arena_sizes(), self._arena_sizes(on_host=True))
        self.optimizer.program.build(self.arena, choices)
        if self.heldout:
            self.heldout.program.build(self.arena, choices)
        for scorer in self._scorers():
            scorer.use(self.arena, choices)
        self.teachers.place(self.arena, choices)
        self.trained.upload_constants(self.device)
        if self.references:
            self.references.upload_constants(self.device)
        if self.norms:
            self.norms.program.build(self.arena, choices)
            self.norms.measure()
        self.optimizer.initialise(self.device)
        self.tables.upload(self.device)
        if self.engine:
            self.engine.place(self.arena)

    def begin(self) -> None:
        """Zero the totals of a step, and compute DoRA's norms; the last update has zeroed the gradients."""
        self.totals.clear(self.device)
        if self.norms:
            self.norms.program.run()

    def accumulate(self, groups: Sequence[Group]) -> None:
        """Add the losses, metrics and gradients of a batch of groups to the totals since `begin`."""
        batch = self.batch_for(groups)
        batch.upload(self.with_targets(groups))
        batch.program.run()

    def with_targets(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with what their objectives need to know of references and teachers."""
        return self.teachers.with_teacher_logits(self.with_reference_logprobs(groups))

    def with_reference_logprobs(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with the log-probabilities of their answers under their reference, if they need them."""
        open = [i for i, group in enumerate(groups) if not self._objectives[group.slot].has_reference(group)]
        result = list(groups)
        for i, logprobs in zip(open, self._frozen_logprobs([groups[i].segments for i in open]), strict=True):
            result[i] = self._objectives[groups[i].slot].referenced(groups[i], logprobs)
        return result

    def with_kl_estimate(self, batches: Sequence[Sequence[Group]]) -> list[list[Group]]:
        """The batches of a step with what `Objective.estimate` makes of their mismatched rows, by slot."""
        rows: dict[int, list[Segment]] = {}
        for group in (group for batch in batches for group in batch):
            if group.kl_row:
                rows.setdefault(group.slot, []).append(group.kl_row)
        shared = {}
        for slot, segments in rows.items():
            assert self.current is not None
            objective = self._objectives[slot]
            single = [[segment] for segment in segments]
            policy = [objective.sums(logprobs)[0] for logprobs in self.current.logprobs(single)]
            reference = [objective.sums(logprobs)[0] for logprobs in self._frozen_logprobs(single)]
            shared[slot] = objective.estimate(policy, reference)
        return [[replace(g, kl_estimate=shared[g.slot]) if g.kl_row else g for g in batch] for batch in batches]

    def _frozen_logprobs(self, samples: Sequence[Sequence[Segment]]) -> list[list[np.ndarray]]:
        """Log-probabilities of samples' targets under the references of their slots."""
        if not samples:
            return []
        assert self.frozen is not None
        slots, objectives = self._frozen_slots, self._objectives
        degrees = [objectives[sample[0].slot or 0].temperatures[0] for sample in samples]
        placed = [[replace(segment, slot=slots.get(segment.slot)) for segment in sample] for sample in samples]
        return self.frozen.logprobs(placed, degrees)

    def reference_logprobs(self, segments: Sequence[Segment]) -> list[np.ndarray]:
        """The log-probabilities of each segment's targets under the reference of its slot."""
        return [logprobs[0] for logprobs in self._frozen_logprobs([[segment] for segment in segments])]

    def release_references(self) -> None:
        """Free what only the reference passes need, if no step has any: all references have been precomputed."""
        live = [o for o in self._objectives if o.reference and (o.needs_kl_rows or not o.precomputes)]
        if self.frozen and not live:
            storages = self.references.storages() if self.references else set()
            release(
                self.device,
                (self.frozen.storages() | storages) - self.model.decoder.storages() - self.tables.storages(),
            )

    def place_initial(self, slot: int, matrices: Matrices) -> None:
        """Upload the adapter that a slot starts from, one module at a time, and its offset, if it has one.

        Magnitudes that it lacks are those of its weights.
        """
        spec, lacking = self.adapters.specs[slot], False
        for module, parts in matrices.items():
            self.adapters.write(self.device, slot, {module: parts})
            if self.adapters.offset and spec.offset:
                self.adapters.offset.write(self.device, slot, {module: (parts[0], -parts[1])})
            lacking |= spec.dora and len(parts) < len(PARTS)
        if lacking and self.norms:
            self.norms.place_initial(slot)

    def place_reference(self, slot: int, matrices: Matrices) -> None:
        """Upload the frozen adapter that a slot is compared with."""
        assert self.references is not None
        self.references.write(self.device, self._frozen_slots[slot], matrices)
        fix_gains(self.model, self.references)

    def batch_for(self, groups: Sequence[Group]) -> Batch:
        """The smallest bucket that holds the groups; its compute pipelines are compiled on first use."""
        tokens = sum(group.tokens for group in groups)
        bucket = min(size for size in self.steps if size >= tokens)
        batch = self.steps[bucket]
        if bucket not in self.built:
            assert self.arena is not None, "allocate() first"
            batch.program.build(self.arena, self.choices)
            self.built.add(bucket)
        return batch

    def close(self) -> None:
        """Free everything except the base, which other runs may use."""
        self.teachers.close()
        release(self.device, self.storages() - self.model.decoder.storages())
        if self.arena:
            self.arena.free()
        self._claim.close()


def heldout_loss(
    session: Session, stream: DataStream, slot: int, watch: Callable[[int], None] = lambda rows: None
) -> dict[str, float]:
    """The mean loss of a stream's samples under one slot's adapter, without dropout, and the objective's metrics.

    watch: called with the number of finished rows, first with 0.
    """
    batch = session.heldout
    assert batch is not None, "the session has no held-out batch"
    sums = dict.fromkeys(("loss", *stream.objective.metrics), 0.0)
    completed = 0
    watch(completed)
    packed = pack(stream.lengths, range(len(stream.lengths)), batch.tokens)
    for together, groups in zip(packed, session.with_kl_estimate(stream.heldout_groups(packed, slot)), strict=True):
        session.begin()
        with_targets = session.with_targets(groups)
        stream.references |= {i: g.reference for i, g in zip(together, with_targets, strict=True) if g.reference}
        batch.upload(with_targets)
        batch.program.run()
        # Summed in float64: a float32 total over many batches would lose precision.
        sums["loss"] += session.totals.read_loss(session.device, slot)
        for name, value in session.totals.read_metrics(session.device, slot, stream.objective).items():
            sums[name] += value
        completed += len(together) * stream.prepared.parts
        watch(completed)
    units = stream.units(range(len(stream.lengths)))
    return {"loss": sums.pop("loss") / units, **stream.objective.logged(sums, units)}


def precompute(session: Session, stream: DataStream, slot: int, events: Events, name: str | None) -> None:
    """Fill `stream.references`."""
    assert session.frozen is not None
    samples = range(len(stream.lengths))
    at = Evaluating(0, len(stream.prepared.rows), adapter=name)
    events.evaluating(at)
    for together in pack(stream.lengths, samples, max(session.frozen.passes)):
        groups = session.with_reference_logprobs([stream.group(sample, 1.0, slot) for sample in together])
        result = {sample: group.reference for sample, group in zip(together, groups, strict=True) if group.reference}
        stream.references |= result
        at = replace(at, rows=at.rows + len(together) * stream.prepared.parts)
        events.evaluating(at)
