"""From options to a job of one adapter, for the command line and Python."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from filelock import Timeout
from safetensors import SafetensorError

from wgpu_lora.assets import DEMO_HELDOUT, DEMO_TRAIN
from wgpu_lora.data import Source, TokenizedData
from wgpu_lora.data.memory_rows import SealedRows
from wgpu_lora.errors import StorageError, UserError, reason
from wgpu_lora.events import SILENT, Events
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.tiling import Capabilities
from wgpu_lora.gpu.tuner import Tuner, tuning_enabled
from wgpu_lora.gpu.tuning_cache import Choices
from wgpu_lora.gpu.verdicts import verdicts_of
from wgpu_lora.locks import check_output, lock_file, unlink_lock
from wgpu_lora.memory_leases import budget_bytes, claim
from wgpu_lora.models.adapter_set import AdapterSet, SlotSpec
from wgpu_lora.models.loaded_model import LoadedModel, declare_decoder, open_model
from wgpu_lora.models.parameters import ParameterSet
from wgpu_lora.models.published_shapes import shape_config
from wgpu_lora.models.quant_constants import QuantConstants
from wgpu_lora.models.synthetic_models import synthetic_model
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.ops.activation_storage import Saving
from wgpu_lora.rewards.reward_functions import RewardFunctions
from wgpu_lora.rewards.tools import Tools
from wgpu_lora.track.trackers import check_libraries
from wgpu_lora.train.data_parallel.leader import DataParallelLeader, check_shared
from wgpu_lora.train.init_methods import offsets
from wgpu_lora.train.loop.trainer import Trainer
from wgpu_lora.train.memory import Replan, check_adapters, check_memory, options_that_fit
from wgpu_lora.train.objective_eval import open_unrounded_model, unrounded_loss
from wgpu_lora.train.objectives import objective_of
from wgpu_lora.train.objectives.grpo import GRPO
from wgpu_lora.train.objectives.objective import Objective
from wgpu_lora.train.optimizers import optimizer_of
from wgpu_lora.train.options.training_arguments import LENGTH, LENGTH_OPTIONS, OUTPUT, TrainingArguments
from wgpu_lora.train.run import disk_space, run_checkpoint
from wgpu_lora.train.run.adapter_init import (
    check_reference_base,
    check_residual,
    frozen_adapter,
    init_from_reference,
    initial_adapter,
)
from wgpu_lora.train.run.adapter_run import AdapterRun
from wgpu_lora.train.run.checkpoint_store import PLAIN_FILES, CheckpointStore
from wgpu_lora.train.run.records import PipelineRecord, RunRecord
from wgpu_lora.train.run.resume import check_output_free, planned_options, recorded_rate, resume_note
from wgpu_lora.train.run.run_checkpoint import Trainable
from wgpu_lora.train.run.run_tracking import track_runs
from wgpu_lora.train.run.stop_reasons import Requests
from wgpu_lora.train.run.teacher_setup import check_caches, live_teacher, with_cached_length, with_template_date
from wgpu_lora.train.run.trained_options import fit_length, shortened
from wgpu_lora.train.run.trained_weights import TrainableAdapter, TrainableQuantScales
from wgpu_lora.train.session.data_stream import DataStream, group_lengths, quarters
from wgpu_lora.train.session.rollout_stream import RolloutStream, completion_batches, stream_of
from wgpu_lora.train.session.rollouts import Rollouts
from wgpu_lora.train.session.session import Sampling, Session
from wgpu_lora.train.session.tool_turns import ToolTurns
from wgpu_lora.train.training_data import default_batches, read_rows, sources_of, tools_of
from wgpu_lora.weights.base_formats import AUTO

LOCK = ".lock"
Record = TypeVar("Record", RunRecord, PipelineRecord)  # its result


@dataclass(repr=False)
class Job(Generic[Record]):
    """A session and the runs of its slots; nothing is allocated yet.

    requests: of other threads, while it trains.
    """

    session: Session
    runs: Sequence[AdapterRun]
    replan: Replan
    requests: Requests = field(default_factory=Requests, kw_only=True)
    _disk_bytes: int = field(default=0, init=False)  # that the run needs

    @property
    def run(self) -> AdapterRun:
        """The only run, or the first."""
        return self.runs[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(repr(str(run.directory)) for run in self.runs)})"

    def directories(self) -> list[Path]:
        """The directories that the job writes to and locks."""
        return [run.directory for run in self.runs]

    def record_directory(self) -> Path:
        """Where the record of the job is written."""
        return self.run.directory

    def check_memory(self) -> None:
        """Raise UserError if the device has too little memory, naming options that would make the run fit."""
        args = self.run.args
        budget = budget_bytes(self.session.device.info, args.budget())
        plan = self.session.memory()
        check_memory(plan.peak_device_bytes, plan.groups["base"], budget, args, self.replan)

    def train(self, events: Events = SILENT) -> Record:
        """Wait for device memory, tune kernels, load the weights, train and write; returns the record.

        Raises:
            UserError: for example, a directory is in use or the disk is full.
        """
        self.check_memory()
        info, args = self.session.device.info, self.run.args
        budget, need = budget_bytes(info, args.budget()), self.session.needs()
        with ExitStack() as stack:
            for directory in self.directories():
                stack.enter_context(locked(directory))
            label = f"finetune {self.directories()[-1]}"
            seconds = args.wait_seconds()
            stack.enter_context(claim(self.session.device, need, label, budget, seconds, events, self._beside))
            stack.enter_context(track_runs(self.runs, info, self.record_directory(), events))
            try:
                for run in self.runs:
                    if run.rollouts:
                        run.rollouts.rewards.load()
                    run.prepare_directory()
                device = self.session.device
                self.begin(events)
                device.peak_allocated = device.allocated  # of this run only
                self.session.allocate(events, self.choose_tilings(events))
                return self._train(events)
            finally:
                self.session.close()
                for run in self.runs:
                    if run.rollouts:
                        run.rollouts.close()

    def _beside(self, free: int) -> str:
        """Options that would make the run fit into the free memory."""
        result = options_that_fit(free, self.run.args, self.replan)
        return f"run with {result}" if result else ""

    def tuner(self) -> Tuner | None:
        """The tuner of kernel tilings; None if the run is resumed or uses the defaults."""
        args = self.run.args
        return Tuner(self.session.device, retune=args.retune) if tuning_enabled(args.tune) and not args.resume else None

    def choose_tilings(self, events: Events) -> Choices:
        """The tilings of the run's kernels, timed unless they are known. Raises UserError if a kernel has none."""
        tuner = self.tuner()
        with verdicts_of(self.session.device).reported_to(events):
            choices = tuner.tune(self.session.programs(), events) if tuner else self.run.state.tiles
        for run in self.runs:
            run.state.tiles = choices
        return choices

    def _train(self, events: Events) -> Record:
        try:
            for run in self.runs:
                run.place(self.session)
            self._disk_bytes = disk_space.reserve(self.session, self.runs)
            for run in self.runs:
                run.precompute(self.session, events)
            self.session.release_references()
            return self.finish(events)
        except (OSError, SafetensorError) as error:  # safetensors raises its own error if the disk is full
            raise self._unwritten(error) from error
        finally:
            disk_space.release(self.runs)

    def _unwritten(self, error: Exception) -> StorageError:
        """The error for a file that could not be written: which results exist, and how to continue."""
        where = getattr(error, "filename", None) or self.directories()[-1]
        full = getattr(error, "errno", None) in disk_space.FULL and self._disk_bytes
        mend = f"make room for {self._disk_bytes + disk_space.GROWTH:,} bytes there" if full else "fix that"
        state = self.newest_state()
        newest = f"the newest complete state is {state}" if state else "there is no complete state yet"
        go_on = f"go on with {setting('resume', True)}" if state else "start again"
        return StorageError(f"Writing to {where} failed ({reason(error)}), and {newest}: {mend} and {go_on}.")

    def newest_state(self) -> Path | None:
        """The newest state on disk that the job can be resumed from."""
        result = run_checkpoint.latest_checkpoint(self.run.directory, self.run.storage)
        return result and self.run.storage.disk_path(result)

    def begin(self, events: Events) -> None:
        """Called before the device's memory is allocated."""

    def finish(self, events: Events) -> Record:
        """Train and write the results."""
        raise NotImplementedError


@contextmanager
def locked(directory: Path, name: str = LOCK) -> Iterator[None]:
    """Lock a directory against other processes, by a file of that name in it, which goes at the end. The directory is
    created if missing, and removed again if it stays empty."""
    check_output(directory, flag("output"))
    is_new = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = lock_file(directory / name).lock
    except Timeout:
        raise UserError(
            f"Another process is writing to {directory}: wait for it, or choose another directory."
        ) from None
    except OSError as error:
        raise UserError(
            f"The output directory {directory} cannot be created ({error.strerror}): choose another."
        ) from error
    try:
        yield
    finally:
        unlink_lock(directory / name)
        lock.release()
        if is_new:
            with suppress(OSError):  # unless the run wrote something
                directory.rmdir()


@dataclass(repr=False)
class FinetuneJob(Job[RunRecord]):
    """The run of a single adapter, in slot 0. sharing: with helpers on other devices."""

    sharing: DataParallelLeader | None = None

    def begin(self, events: Events) -> None:
        run, session = self.run, self.session
        if run.args.rounded_from and run.heldout and not run.resumed_from:
            model = open_unrounded_model(run.args, session.device, session.model.config)
            before = prepare_session(model, [run], evaluation_only=True)
            run.state.unrounded_eval_loss = unrounded_loss(before, run, events)

    def finish(self, events: Events) -> RunRecord:
        trainer = Trainer(self.session, self.runs, events)
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
    storage: CheckpointStore = PLAIN_FILES,
    sharing: DataParallelLeader | None = None,
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
        check_output_free(args.directory, storage, args.overwrite)  # before reading data, and again under the lock
    model = model or open_model(args.model or "demo", args.device, args.base_dtype)
    args = with_stored_dtype(args, model)
    check_adapters([args], model.config, budget_bytes(model.device.info, args.budget()))
    run = prepare_run(args, model, rows=rows, storage=storage)
    if sharing:
        check_shared(run.args)

    def session(model: LoadedModel, run: AdapterRun) -> Session:
        return prepare_session(model, [run], batch_tokens=run.stream.buckets()[-1] if sharing else None)

    def replan(changes: Mapping[str, Any]) -> int:
        new_run = replan_run(run, changes)
        return session(with_base_dtype(model, new_run.args.base_dtype), new_run).memory().peak_device_bytes

    return FinetuneJob(session(model, run), [run], replan, sharing)


def with_stored_dtype(args: TrainingArguments, model: LoadedModel) -> TrainingArguments:
    """The options with the base format that the model has, and the type that its device computes the fastest in."""
    keeps_format = args.base_dtype == AUTO or model.config.packed
    if args.compute_dtype == AUTO:
        args = replace(args, compute_dtype="f16" if model.device.capabilities.matrix else "f32")
    return replace(args, base_dtype=model.decoder.base_dtype) if keeps_format else args


def prepare_run(
    args: TrainingArguments,
    model: LoadedModel,
    slot: int = 0,
    name: str | None = None,
    weight: float = 1.0,
    rows: Mapping[str, Source] | None = None,
    adapter_options: Collection[str] = (),
    storage: CheckpointStore = PLAIN_FILES,
) -> AdapterRun:
    """Prepare one slot's run: rows, batches, adapter and starting point.

    Args:
        adapter_options: options that the adapters file sets for this adapter.

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
        check_reference_base(path, model.name, model.checkpoint.digest())
    args, begins = init_from_reference(args, objective)
    args, subject = trainable_for(args, model, storage)
    if args.rounded_from and args.train == "quant-scales":
        open_unrounded_model(args, model.device, model.config)
    tools = tools_of(args)
    prepared, heldout = read_rows(args, model, sources, tools=tools)
    cached = check_caches(args, model, prepared, heldout)
    teacher = live_teacher(args, model)
    rate = recorded_rate(args, storage)  # of a run that began under another default
    rate = args.rate_for(model.config.hidden_size) if rate is None else rate
    args = replace(args, learning_rate=rate, beta=getattr(objective, "beta", args.beta))  # for the record
    if isinstance(objective, GRPO):
        args, note = completion_batches(args, objective.num_generations, len(prepared.samples)), ""
    else:
        args, note = default_batches(args, group_lengths(prepared), weight, objective.rows_per_sample)
    stream = stream_of(prepared, args)
    rollouts = rollouts_of(stream, model, heldout, storage, tools)
    texts = {"length": length, "batches": note, "adapter": begins, "note": _reference_note(args, objective)}
    texts["rounding"] = _rounding_note(args, model.device.capabilities)
    notes = [f"{label}: {text}" for label, text in texts.items() if text] + _resume_notes(
        stream, adapter_options, storage
    )
    use = f"use {flag('eval_data')} or {flag('validation_split')}"
    for option in ("eval_steps", "rounded_from"):
        if (value := getattr(args, option)) and not heldout:
            notes.append(f"note: {setting(option, value)} does nothing, since no rows are held out ({use})")
    digests = model.checkpoint.digest(), model.config.digest()
    taught = teacher, teacher.digest() if teacher else cached
    return AdapterRun(
        slot, args, subject, stream, heldout, *digests, name, tuple(notes), reference, *taught, storage=storage,
        rollouts=rollouts,
    )  # fmt: skip


def rollouts_of(
    stream: DataStream,
    model: LoadedModel,
    heldout: TokenizedData | None,
    storage: CheckpointStore = PLAIN_FILES,
    tools: Tools | None = None,
) -> Rollouts | None:
    """What samples completions, if the objective does. Raises UserError if options or prompts do not suit it."""
    if not isinstance(stream, RolloutStream):
        return None
    policy, positions = stream.policy, model.config.max_position_embeddings
    if stream.args.train == "quant-scales":
        raise UserError(
            f"{setting('objective', stream.args.objective)} samples with an adapter, and "
            f"{setting('train', stream.args.train)} trains none: train an adapter."
        )
    if storage is not PLAIN_FILES:
        raise UserError(
            f"{setting('objective', stream.args.objective)} gives rows to reward functions beside the run, which a "
            "protected run may not: choose another objective."
        )
    stream.check(positions)
    if heldout:
        longest = max(map(len, (row.input_ids for row in heldout.rows))) + policy.max_completion_length
        if longest > positions:
            raise UserError(
                f"The longest held-out prompt leaves no room for {policy.max_completion_length:,} tokens in the "
                f"model's {positions:,} positions: lower {flag('max_completion_length')} or {flag('max_length')}."
            )
    assert policy.reward_funcs
    process = tools.process if tools else None
    rewards = RewardFunctions(policy.reward_funcs, policy.reward_weights, policy.reward_timeout, process)
    turns = None
    if tools:
        kwargs = stream.args.template_kwargs()
        turns = ToolTurns(tools, model.tokenizer, policy.max_tool_calling_iterations, kwargs)
    return Rollouts(stream, rewards, model.tokenizer, turns)


def _rounding_note(args: TrainingArguments, capabilities: Capabilities) -> str:
    """A note on inputs that are rounded to another type than was asked for; '' if there are none."""
    dtype = capabilities.operand_dtype(args.compute_dtype)
    return "" if dtype == args.compute_dtype else f"to {dtype} instead of {args.compute_dtype}, for the matrix units"


def _reference_note(args: TrainingArguments, objective: Objective) -> str:
    """A note on the reference of a run that starts from an adapter; '' if there is nothing to say."""
    if not objective.reference or objective.reference_path or not args.init_adapter:
        return ""
    advice = setting("reference_adapter", args.init_adapter)
    return f"the reference is the base model alone, not the initial adapter (that would be {advice})"


def _resume_notes(stream: DataStream, adapter_options: Collection[str], storage: CheckpointStore) -> list[str]:
    """A note on where a resumed run continues; empty for a new run."""
    newest = run_checkpoint.latest_checkpoint(stream.args.directory, storage) if stream.args.resume else None
    if not newest:
        return []
    state, identity = run_checkpoint.check(newest, storage)
    original = planned_options(identity["options"], stream.args, newest, storage)
    extensible = storage is PLAIN_FILES  # a protected run's options are attested
    length_options = [name for name in LENGTH_OPTIONS if name in adapter_options]
    return [f"resumed: {resume_note(state, original, stream, length_options, extensible)}"]


def replan_run(run: AdapterRun, changes: Mapping[str, Any]) -> AdapterRun:
    """The same run with changed options, for planning."""
    args = replace(run.args, **changes)
    if args.length == run.args.length:
        return replace(run, args=args, stream=stream_of(run.stream.prepared, args))
    heldout = shortened(run.heldout, args) if run.heldout else None
    return replace(run, args=args, stream=stream_of(shortened(run.stream.prepared, args), args), heldout=heldout)


def with_base_dtype(model: LoadedModel, base_dtype: str) -> LoadedModel:
    """The same model with another base dtype, for planning. A model that is stored in a base format keeps it."""
    decoder = model.decoder
    if decoder.base_dtype == base_dtype or model.config.packed:
        return model
    new_decoder = declare_decoder(model.config, model.checkpoint, base_dtype, model.device)
    return replace(model, decoder=new_decoder, weights_loaded=False)


def trainable_for(
    args: TrainingArguments, model: LoadedModel, storage: CheckpointStore = PLAIN_FILES
) -> tuple[TrainingArguments, Trainable]:
    """The trainable parameters of a run, and the options updated to match. Raises UserError if it does not fit the
    model."""
    if args.train == "quant-scales":
        return args, TrainableQuantScales.of(args, model)
    args, adapter, initial = initial_adapter(args, model.config, storage)
    check_residual(args, model)
    spec = SlotSpec.of(adapter, initial)
    if offsets(args.init_lora_weights):
        spec = replace(spec, offset=SlotSpec(spec.rank, spec.scaling))
    return args, TrainableAdapter(args, adapter, spec, initial)


def trainable_parameters(model: LoadedModel, subjects: Sequence[Trainable]) -> ParameterSet:
    """The parameters of these slots."""
    first, *_ = subjects
    if isinstance(first, TrainableQuantScales):
        return QuantConstants.declare(first.weights, model.device.max_binding)
    adapters = [subject for subject in subjects if isinstance(subject, TrainableAdapter)]
    return AdapterSet.declare(model.config, [adapter.spec for adapter in adapters], model.device.max_binding)


def prepare_session(
    model: LoadedModel,
    runs: Sequence[AdapterRun],
    *,
    batch_tokens: int | None = None,
    evaluation_only: bool = False,
) -> Session:
    """The session of the runs, a slot each; other settings are taken from the first run's options.

    Args:
        batch_tokens: maximum tokens of a batch that slots share, or that is computed in parts.
        evaluation_only: for the held-out loss of the model itself, by the objective of the run.
    """
    buckets = runs[0].stream.buckets() if batch_tokens is None else quarters(batch_tokens)
    trained: ParameterSet
    if evaluation_only:
        empty_slot = SlotSpec(1, {next(iter(model.config.lora_modules)): 1.0})  # B is zero
        trained = AdapterSet.declare(model.config, [empty_slot], model.device.max_binding)
    else:
        trained = trainable_parameters(model, [run.subject for run in runs])
    args = runs[0].args
    heldout = [n for run in runs if run.heldout and not run.rollouts for n in group_lengths(run.heldout)]
    streams = [s for run in runs for s in (run.stream, run.heldout_stream if run.heldout else None) if s]
    return Session(
        model,
        trained,
        [] if evaluation_only else buckets,
        positions=max(stream.longest for stream in streams),
        dropout=any(run.args.lora_dropout > 0 and run.args.train != "quant-scales" for run in runs),
        recompute=args.gradient_checkpointing,
        compute_dtype=args.compute_dtype,
        saving=Saving(args.activation_dtype, args.offload_activations),
        objectives=[run.stream.objective for run in runs],
        optim=optimizer_of(args),
        eval_tokens=max([buckets[-1], *heldout]) if heldout else 0,
        references={run.slot: run.reference.spec for run in runs if run.reference},
        teachers={run.slot: run.teacher for run in runs if run.teacher},
        mismatched=max(stream.longest_mismatched for stream in streams),
        sampling=sampling_of([stream for stream in streams if isinstance(stream, RolloutStream)]),
    )


def sampling_of(streams: Sequence[RolloutStream]) -> Sampling | None:
    """The sizes of the engine that samples for all of these streams. Raises UserError if their temperatures differ."""
    if not streams:
        return None
    sizes = [stream.sampling for stream in streams]
    if len({size.temperature for size in sizes}) > 1:
        raise UserError(
            f"Adapters that are trained together must sample at one {flag('temperature')}: give all the same."
        )
    return Sampling(max(size.sequences for size in sizes), max(size.tokens for size in sizes), sizes[0].temperature)


SHAPE_ROWS, SHAPE_DATA = 64, "made-up rows"  # of a job of a shape


def prepare_shape_job(shape: str, args: TrainingArguments) -> FinetuneJob:
    """Prepare a job for a model of a published shape with random weights, whose rows are as long as they may be.

    Allocates nothing on the device.

    Raises:
        UserError: the shape is not known, a model or data are given, or the options do not suit it.
    """
    for name in ("model", "data", "eval_data"):
        if getattr(args, name) is not None:
            raise UserError(f"{flag(name)} and {flag('shape')} exclude each other: leave one of them out.")
    config = shape_config(shape)
    model = synthetic_model(config, Device(args.device), args.base_dtype, shape)
    length = args.max_length or min(LENGTH, config.max_position_embeddings)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (SHAPE_ROWS, length))
    content = "".join(json.dumps({"input_ids": row, "labels": row}) + "\n" for row in tokens.tolist())
    source = SealedRows(bytearray(content.encode()), SHAPE_DATA, "")
    return prepare_job(replace(args, model=shape, data=SHAPE_DATA), model, planning=True, rows={"data": source})
