"""From options to a job of one adapter, for the command line and Python."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wgpu_lora.assets import DEMO_HELDOUT, DEMO_TRAIN
from wgpu_lora.data import Source
from wgpu_lora.errors import UserError
from wgpu_lora.events import Events
from wgpu_lora.models.constants import ConstantSet
from wgpu_lora.models.decoder import Decoder
from wgpu_lora.models.load import table_dtype
from wgpu_lora.models.loaded import LoadedModel, open_model
from wgpu_lora.models.lora import AdapterSet, SlotSpec
from wgpu_lora.models.parameters import ParameterSet
from wgpu_lora.names.naming import flag, setting
from wgpu_lora.ops.saved import Saving
from wgpu_lora.share import budget_bytes
from wgpu_lora.track.report_to import check_libraries
from wgpu_lora.train import checkpoint
from wgpu_lora.train.batching import fitted
from wgpu_lora.train.frozen import check_base, frozen_adapter, starting_at_reference
from wgpu_lora.train.initial import adapter_of, check_residual
from wgpu_lora.train.initialisation import offsets
from wgpu_lora.train.job import Job
from wgpu_lora.train.length import fit_length, shortened
from wgpu_lora.train.memory import check_adapters
from wgpu_lora.train.objectives import objective_of
from wgpu_lora.train.objectives.base import Objective
from wgpu_lora.train.optimizers import optimizer_of
from wgpu_lora.train.options.arguments import OUTPUT, PLAN, TrainingArguments
from wgpu_lora.train.records import RunRecord
from wgpu_lora.train.resume import plan_of, refuse_used, resume_note
from wgpu_lora.train.rows import read_rows, sources_of
from wgpu_lora.train.session import Session
from wgpu_lora.train.sharing import Sharing, check_shared
from wgpu_lora.train.slot import AdapterRun
from wgpu_lora.train.storage import PLAIN, Storage
from wgpu_lora.train.stream import DataStream, group_lengths, quarters
from wgpu_lora.train.subject import Subject
from wgpu_lora.train.subjects.adapter import Adapter
from wgpu_lora.train.subjects.quant_scales import QuantScales
from wgpu_lora.train.teacher import check_caches, live_teacher, with_cached_length, with_template_date
from wgpu_lora.train.trainer import StepKeeper, Trainer
from wgpu_lora.train.unrounded import loss_of, unrounded


@dataclass(repr=False)
class FinetuneJob(Job[RunRecord]):
    """The run of a single adapter, in slot 0. sharing: with helpers on other devices."""

    sharing: Sharing | None = None

    def begin(self, events: Events) -> None:
        run, session = self.run, self.session
        if run.args.rounded_from and run.heldout and not run.resumed_from:
            before = evaluating_session(unrounded(run.args, session.device, session.model.config), run)
            run.state.unrounded_eval_loss = loss_of(before, run, events)

    def finish(self, events: Events) -> RunRecord:
        trainer = Trainer(self.session, self.runs, StepKeeper(self.run), events)
        trainer.requests, trainer.sharing = self.requests, self.sharing
        return trainer.train()[self.run.slot]


def with_demo_data(args: TrainingArguments) -> TrainingArguments:
    """Fill in the demo model if none is given, and for it the demo's data."""
    if args.data is None:
        if args.model not in (None, "demo"):
            raise UserError(
                f"{flag('data')} is missing: give a file of rows, a folder with train.jsonl, or a Hugging Face dataset."
            )
        cached = args.teacher_cache and not args.eval_teacher_cache  # which has the training rows only
        heldout = None if args.validation_split or cached else str(DEMO_HELDOUT)
        args = replace(args, data=str(DEMO_TRAIN), eval_data=args.eval_data or heldout)
    return replace(args, model=args.model or "demo", output=args.output or OUTPUT)


def prepare_job(
    args: TrainingArguments,
    model: LoadedModel | None = None,
    *,
    planning: bool = False,
    rows: Mapping[str, Source] | None = None,
    storage: Storage = PLAIN,
    sharing: Sharing | None = None,
) -> FinetuneJob:
    """Read the data and the model's files, and record the programs. Allocates nothing on the device.

    Args:
        model: an opened model to train on, instead of the one in the options.
        planning: the job will not be run, so --output may be in use.
        rows: rows from Python, by option (data or eval_data).
        sharing: helpers on other devices, which compute parts of its steps.
        storage: of the run's files.

    Raises:
        UserError: the data, the model, the options or the device are unsuitable.
    """
    args = with_demo_data(args)
    if not planning:
        check_libraries(args.report_to)
    if not (planning or args.resume):
        refuse_used(args.directory, storage, args.overwrite)  # before reading data, and again under the lock
    model = model or open_model(args.model or "demo", args.device, args.base_dtype)
    args = as_stored(args, model)
    check_adapters([args], model.config, budget_bytes(model.device.info, args.budget()))
    run = read_run(args, model, rows=rows, storage=storage)
    recorded = shared_session if sharing else single_session

    def replan(changes: Mapping[str, Any]) -> int:
        other = with_options(run, changes)
        return recorded(declared_as(model, other.args.base_dtype), other).memory().guarded

    return FinetuneJob(recorded(model, run), [run], replan, sharing)


def as_stored(args: TrainingArguments, model: LoadedModel) -> TrainingArguments:
    """The options with the base format that the model is stored in, if it is."""
    return replace(args, base_dtype=model.config.packed) if model.config.packed else args


def read_run(
    args: TrainingArguments,
    model: LoadedModel,
    slot: int = 0,
    name: str | None = None,
    weight: float = 1.0,
    rows: Mapping[str, Source] | None = None,
    own: Collection[str] = (),
    storage: Storage = PLAIN,
) -> AdapterRun:
    """Prepare one slot's run: rows, batches, adapter and starting point.

    Args:
        own: options that the adapters file sets for this adapter.

    Raises:
        UserError: the data or the adapter cannot be read, or do not fit the model.
    """
    sources = sources_of(args, rows)
    args = with_template_date(with_cached_length(args), model)
    args, length = fit_length(args, model.config.max_position_embeddings)
    objective = objective_of(args)
    reference = None
    if path := objective.reference_path:
        reference = frozen_adapter(path, model.config)
        check_base(path, model.name, model.checkpoint.digest())
    args, begins = starting_at_reference(args, objective)
    args, subject = subject_of(args, model, storage)
    if args.rounded_from and args.train == "quant-scales":
        unrounded(args, model.device, model.config)
    prepared, heldout = read_rows(args, model, sources)
    cached = check_caches(args, model, prepared, heldout)
    teacher = live_teacher(args, model)
    args = replace(args, learning_rate=args.rate)
    args, note = fitted(args, group_lengths(prepared), weight, objective.parts)
    stream = DataStream(prepared, args)
    chosen = {"length": length, "batches": note, "adapter": begins, "note": _unreferenced(args, objective)}
    notes = [f"{label}: {said}" for label, said in chosen.items() if said] + _standing(stream, own, storage)
    use = f"use {flag('eval_data')} or {flag('validation_split')}"
    for option in ("eval_steps", "rounded_from"):
        if (value := getattr(args, option)) and not heldout:
            notes.append(f"note: {setting(option, value)} does nothing, since no rows are held out ({use})")
    digests = model.checkpoint.digest(), model.config.digest()
    taught = teacher, teacher.digest() if teacher else cached
    return AdapterRun(
        slot, args, subject, stream, heldout, *digests, name, tuple(notes), reference, *taught, storage=storage
    )


def _unreferenced(args: TrainingArguments, objective: Objective) -> str:
    """A note on the reference of a run that starts from an adapter; '' if there is nothing to say."""
    if not objective.reference or objective.reference_path or not args.init_adapter:
        return ""
    advice = setting("reference_adapter", args.init_adapter)
    return f"the reference is the base model alone, not the initial adapter (that would be {advice})"


def _standing(stream: DataStream, own: Collection[str], storage: Storage) -> list[str]:
    """A note on where a resumed run continues; empty for a new run."""
    newest = checkpoint.newest(stream.args.directory, storage) if stream.args.resume else None
    if not newest:
        return []
    state, identity = checkpoint.check(newest, storage)
    planned = plan_of(identity["options"], stream.args, newest, storage)
    extensible = storage is PLAIN  # a protected run's options are attested
    return [f"resumed: {resume_note(state, planned, stream, [name for name in PLAN if name in own], extensible)}"]


def with_options(run: AdapterRun, changes: Mapping[str, Any]) -> AdapterRun:
    """The same run with changed options, for planning."""
    args = replace(run.args, **changes)
    if args.length == run.args.length:
        return replace(run, args=args, stream=DataStream(run.stream.prepared, args))
    heldout = shortened(run.heldout, args) if run.heldout else None
    return replace(run, args=args, stream=DataStream(shortened(run.stream.prepared, args), args), heldout=heldout)


def declared_as(model: LoadedModel, base_dtype: str) -> LoadedModel:
    """The same model with another base dtype, for planning. A model that is stored in a base format keeps it."""
    decoder = model.decoder
    if decoder.base_dtype == base_dtype or model.config.packed:
        return model
    table = table_dtype(model.checkpoint, model.config)
    other = Decoder.declare(model.config, base_dtype, table, model.device.max_binding)
    return replace(model, decoder=other, weights_loaded=False)


def subject_of(
    args: TrainingArguments, model: LoadedModel, storage: Storage = PLAIN
) -> tuple[TrainingArguments, Subject]:
    """What a run trains, and the options updated to match. Raises UserError if it does not fit the model."""
    if args.train == "quant-scales":
        return args, QuantScales.of(args, model)
    args, adapter, initial = adapter_of(args, model.config, storage)
    check_residual(args, model)
    spec = SlotSpec.of(adapter, initial)
    if offsets(args.init_lora_weights):
        spec = replace(spec, offset=SlotSpec(spec.rank, spec.scaling))
    return args, Adapter(args, adapter, spec, initial)


def trained_by(model: LoadedModel, subjects: Sequence[Subject]) -> ParameterSet:
    """The parameters of these slots."""
    first, *_ = subjects
    if isinstance(first, QuantScales):
        return ConstantSet.declare(first.weights, model.device.max_binding)
    adapters = [subject for subject in subjects if isinstance(subject, Adapter)]
    return AdapterSet.declare(model.config, [adapter.spec for adapter in adapters], model.device.max_binding)


def session_of(model: LoadedModel, runs: Sequence[AdapterRun], batch_tokens: int | None = None) -> Session:
    """The session of the runs, a slot each; other settings are taken from the first run's options.

    Args:
        batch_tokens: maximum tokens of a batch that slots share.
    """
    buckets = runs[0].stream.buckets() if batch_tokens is None else quarters(batch_tokens)
    return _session(model, runs, trained_by(model, [run.subject for run in runs]), buckets, buckets[-1])


def single_session(model: LoadedModel, run: AdapterRun) -> Session:
    """The session of one run."""
    return session_of(model, [run])


def shared_session(model: LoadedModel, run: AdapterRun) -> Session:
    """The session of a run whose steps are shared (train/sharing.py), with programs for parts of its batches."""
    check_shared(run.args)
    return session_of(model, [run], run.stream.buckets()[-1])


def evaluating_session(model: LoadedModel, run: AdapterRun) -> Session:
    """A session without training, for the held-out loss of a model itself by the objective of a run."""
    nothing = SlotSpec(1, {next(iter(model.config.lora_modules)): 1.0})  # B is zero
    trained = AdapterSet.declare(model.config, [nothing], model.device.max_binding)
    return _session(model, [run], trained, [], max(run.stream.buckets()))


def _session(
    model: LoadedModel, runs: Sequence[AdapterRun], trained: ParameterSet, buckets: list[int], tokens: int
) -> Session:
    """tokens: of a held-out batch, at least."""
    args = runs[0].args
    heldout = [length for run in runs if run.heldout for length in group_lengths(run.heldout)]
    return Session(
        model,
        trained,
        buckets,
        positions=max(
            length for run in runs for data in (run.stream.prepared, run.heldout) if data for length in data.lengths
        ),
        dropout=any(run.args.lora_dropout > 0 and run.args.train != "quant-scales" for run in runs),
        recompute=args.gradient_checkpointing,
        compute_dtype=args.compute_dtype,
        saving=Saving(args.activation_dtype, args.offload_activations),
        objectives=[run.stream.objective for run in runs],
        optim=optimizer_of(args),
        eval_tokens=max([tokens, *heldout]) if heldout else 0,
        references={run.slot: run.reference.spec for run in runs if run.reference},
        teachers={run.slot: run.teacher for run in runs if run.teacher},
        mismatched=max(
            stream.longest_mismatched
            for run in runs
            for stream in (run.stream, *([DataStream(run.heldout, run.args)] if run.heldout else []))
        ),
    )
