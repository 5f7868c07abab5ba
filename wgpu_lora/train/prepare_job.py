"""From options to a job, of one adapter or of several, for the command line and Python."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from wgpu_lora.data import Source
from wgpu_lora.data.memory_rows import SealedRows
from wgpu_lora.errors import UserError
from wgpu_lora.files.assets import DEMO_HELDOUT, DEMO_TRAIN
from wgpu_lora.files.paths import working_folder
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.memory_leases import budget_bytes
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.models.published_shapes import shape_config
from wgpu_lora.models.synthetic_models import synthetic_model
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.train.adapter_tasks import AdapterTask, check_distinct, request_of, uniquely_named
from wgpu_lora.train.data_parallel.leader import DataParallelLeader, check_shared
from wgpu_lora.train.job import Job, distinct, locked
from wgpu_lora.train.loop.slot_policy import POLICIES, make_policy
from wgpu_lora.train.memory import check_adapters
from wgpu_lora.train.options.training_arguments import (
    CHANGEABLE_ON_RESUME,
    LENGTH,
    LENGTH_OPTIONS,
    OUTPUT,
    TrainingArguments,
)
from wgpu_lora.train.prepare_run import prepare_run, replan_run
from wgpu_lora.train.prepare_session import prepare_session, with_base_dtype
from wgpu_lora.train.run.adapter_run import AdapterRun
from wgpu_lora.train.run.checkpoint_store import PLAIN_FILES, CheckpointStore
from wgpu_lora.train.run.multi_adapter_run import MultiAdapterRun, recover
from wgpu_lora.train.run.multi_adapter_state import (
    MultiAdapterState,
    difference,
    home_of,
    read_multi_adapter_state,
)
from wgpu_lora.train.run.records import PipelineRecord, RunRecord
from wgpu_lora.train.run.resume import check_output_free
from wgpu_lora.train.run.run_checkpoint import remove_run_leftovers
from wgpu_lora.train.run.run_state import STATE
from wgpu_lora.train.run.stop_reasons import FINISHED, OUTCOMES
from wgpu_lora.train.run.teacher_setup import with_template_date
from wgpu_lora.train.run.trained_options import fit_length
from wgpu_lora.train.session.session import Session
from wgpu_lora.train.track.trackers import check_libraries
from wgpu_lora.weights.base_formats import AUTO

BATCH_TOKENS = 1024  # of a shared batch, if no adapter's own is larger: enough to fill a GPU
SHAPE_ROWS, SHAPE_DATA = 64, "made-up rows"  # of a job of a shape


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


def with_stored_dtype(args: TrainingArguments, model: LoadedModel) -> TrainingArguments:
    """The options with the base format that the model has, and the type that its device computes the fastest in."""
    keeps_format = args.base_dtype == AUTO or model.config.packed
    if args.compute_dtype == AUTO:
        args = replace(args, compute_dtype="f16" if model.device.capabilities.matrix else "f32")
    return replace(args, base_dtype=model.decoder.base_dtype) if keeps_format else args


def prepare_job(
    args: TrainingArguments,
    model: LoadedModel | None = None,
    *,
    planning: bool = False,
    rows: Mapping[str, Source] | None = None,
    storage: CheckpointStore = PLAIN_FILES,
    sharing: DataParallelLeader | None = None,
) -> Job[RunRecord]:
    """Read the data and the model's files, and record the programs. Allocates nothing on the device.

    Args:
        model: an opened model to train on, instead of the one in the options.
        planning: the job will not be run, so --output may be in use.
        rows: rows from Python, by option (data or eval_data).
        sharing: replicas on other devices, which compute parts of its steps.
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

    def tokens(runs: Sequence[AdapterRun]) -> int | None:
        return runs[0].stream.buckets()[-1] if sharing else None

    return _job(model, [run], tokens, sharing=sharing)


def _job(
    model: LoadedModel, runs: Sequence[AdapterRun], tokens: Callable[[Sequence[AdapterRun]], int | None], **more: Any
) -> Job[Any]:
    """The job of prepared runs. tokens: maximum of a shared batch, given the runs. more: fields of Job."""

    def session(model: LoadedModel, runs: Sequence[AdapterRun]) -> Session:
        return prepare_session(model, runs, batch_tokens=tokens(runs))

    def replan(changes: Mapping[str, Any]) -> int:
        planned = [replan_run(run, changes) for run in runs]
        return session(with_base_dtype(model, planned[0].args.base_dtype), planned).memory().peak_device_bytes

    return Job(session(model, runs), runs, replan, **more)


def prepare_multi_adapter_job(
    args: TrainingArguments,
    tasks: Sequence[AdapterTask],
    schedule: str = "synchronized",
    batch_tokens: int | None = None,
    model: LoadedModel | None = None,
    *,
    planning: bool = False,
) -> Job[PipelineRecord]:
    """Read every adapter's data and the model's files, and record the programs. Allocates nothing on the device.

    Args:
        args: options of all adapters, unless a task has its own; `output` is the directory of the pipeline's record,
            by default the first adapter's checkpoint directory.
        schedule: one of POLICIES.
        batch_tokens: maximum tokens of a batch that adapters share; by default what one step of all adapters needs,
            up to the larger of BATCH_TOKENS and the largest batch of one adapter.
        planning: the job will not be run, so the directories may be in use.

    Raises:
        UserError: the tasks, the data, the model, the options or the device are unsuitable.
    """
    tasks = uniquely_named(tasks)
    _check(args, tasks, schedule, batch_tokens)
    if not planning:
        check_libraries(args.report_to)
    home = _home(args, tasks)
    per_task = [task.arguments(args) for task in tasks]
    state = MultiAdapterState()
    if args.resume:
        state = _recovered(home, tasks)
    elif not planning:
        for directory in distinct([home, *(Path(task.checkpoint) for task in tasks)]):
            check_output_free(directory, overwrite=args.overwrite)
    model = model or open_model(args.model or "demo", args.device, args.base_dtype)
    args = with_template_date(with_stored_dtype(args, model), model)
    per_task = [
        with_template_date(with_stored_dtype(task_args, model), model, args.template_date) for task_args in per_task
    ]
    args, _ = fit_length(args, model.config.max_position_embeddings)
    check_adapters(per_task, model.config, budget_bytes(model.device.info, args.budget()))
    # An adapter of a resumed pipeline without a checkpoint starts from the beginning.
    starts = [task.name in state.steps for task in tasks]
    runs = [
        prepare_run(replace(task_args, resume=resumed), model, slot, task.name, task.weight, task.rows, task.options)
        for slot, (task, task_args, resumed) in enumerate(zip(tasks, per_task, starts, strict=True))
    ]
    if schedule == "priority-val-loss":
        blind = [run.adapter_name for run in runs if not run.heldout]
        if blind:
            raise UserError(
                f"{setting('schedule', schedule)} needs held-out data, but adapter '{blind[0]}' has none: give it "
                "'eval_data', or use another schedule."
            )
    tokens = _batch_tokens(runs, schedule, batch_tokens)
    identity = _identity(args, schedule, tokens, tasks)
    state.identity = _full_identity(state.identity)
    if args.resume and state.identity != identity:
        raise UserError(
            f"{flag('resume')} needs the same adapters, schedule and options as the pipeline in {home}: "
            f"{difference(state.identity, identity)}."
        )
    for run in runs:  # a finished run continues if it has been extended
        if state.ended.get(run.adapter_name) in FINISHED and state.steps[run.adapter_name] < run.stream.total_steps():
            del state.ended[run.adapter_name]
        elif state.ended.get(run.adapter_name, FINISHED[0]) not in FINISHED:
            failed = f"resumed: {OUTCOMES[state.ended[run.adapter_name]]} already; it stays as it is"
            run.notes = (*(note for note in run.notes if not note.startswith("resumed: ")), failed)
    try:
        make_policy(schedule, state.policy)
    except ValueError as error:
        raise UserError(
            f"The pipeline's state {home / STATE} is damaged ({error}): start again in other directories."
        ) from None
    state.identity = identity
    requested = {
        "options": replace(args, resume=False, overwrite=False).as_dict(),
        "schedule": schedule,
        "batch_tokens": tokens,
        "directory": str(working_folder()),
    }
    state.request = {**requested, "adapters": request_of(tasks, home)}

    shared = MultiAdapterRun(home, schedule, tokens, args, state)
    return _job(model, runs, lambda runs: _batch_tokens(runs, schedule, batch_tokens), shared=shared)


def prepare_shape_job(shape: str, args: TrainingArguments) -> Job[RunRecord]:
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


def _home(args: TrainingArguments, tasks: Sequence[AdapterTask]) -> Path:
    """The directory of the pipeline's record."""
    first = Path(tasks[0].checkpoint)
    directory = args.directory if args.output else first
    return (home_of(directory) or directory) if args.resume else directory


def _check(args: TrainingArguments, tasks: Sequence[AdapterTask], schedule: str, batch_tokens: int | None) -> None:
    if not tasks:
        raise UserError(f"A pipeline needs at least one adapter: give one with {flag('adapters')}.")
    if schedule not in POLICIES:
        raise UserError(f"{flag('schedule')} must be one of {', '.join(POLICIES)}, not {schedule}.")
    if batch_tokens is not None and (type(batch_tokens) is not int or batch_tokens < 1):
        raise UserError(f"{flag('batch_tokens')} must be a whole number greater than 0, not {batch_tokens!r:.40}.")
    if args.target_seconds:
        raise UserError(
            f"{flag('target_seconds')} works with one adapter only: use {flag('max_steps')} or "
            f"{flag('num_train_epochs')}."
        )
    if args.train == "quant-scales":
        raise UserError(
            f"{setting('train', args.train)} trains the base itself, which all adapters of a pipeline share: train it "
            "in a run of its own, then the adapters on the result."
        )
    if args.data is not None:
        raise UserError(f"{flag('data')} and {flag('adapters')} cannot be combined: every adapter names its own data.")
    check_distinct(tasks)


def _batch_tokens(runs: Sequence[AdapterRun], schedule: str, batch_tokens: int | None) -> int:
    largest = [run.stream.buckets()[-1] for run in runs]
    longest = max(length for run in runs for length in run.stream.lengths)
    if batch_tokens is not None:
        if batch_tokens < longest:
            raise UserError(
                f"{setting('batch_tokens', batch_tokens)} is less than the longest row ({longest:,} tokens): raise it "
                "to that."
            )
        return batch_tokens
    together = sum(largest) if POLICIES[schedule].together else max(largest)
    return min(together, max(BATCH_TOKENS, *largest))


def _identity(args: TrainingArguments, schedule: str, tokens: int, tasks: Sequence[AdapterTask]) -> dict[str, Any]:
    """The identity of a pipeline, which must match when it is resumed; options of adapters are compared with their
    checkpoints."""
    adapters = [{"name": task.name, "weight": task.weight} for task in tasks]
    return {"schedule": schedule, "batch_tokens": tokens, "adapters": adapters, "options": _fixed(args)}


def _full_identity(identity: dict[str, Any]) -> dict[str, Any]:
    """A recorded identity, with defaults for options that did not exist in the version that wrote it."""
    # Version 0.1.0 had an adapter's objective here, which is now one of the adapter's own options.
    adapters = [{k: v for k, v in adapter.items() if k != "objective"} for adapter in identity.get("adapters", [])]
    return {**identity, "adapters": adapters, "options": _fixed(TrainingArguments()) | identity.get("options", {})}


def _fixed(args: TrainingArguments) -> dict[str, Any]:
    """The options that may not change when a pipeline is resumed."""
    return {k: v for k, v in args.as_dict().items() if k not in CHANGEABLE_ON_RESUME and k not in LENGTH_OPTIONS}


def _recovered(home: Path, tasks: Sequence[AdapterTask]) -> MultiAdapterState:
    state = read_multi_adapter_state(home)
    directories = {task.name: Path(task.checkpoint) for task in tasks}
    missing = [name for name in state.steps if name not in directories]
    if missing:
        raise UserError(
            f"The pipeline in {home} also has an adapter '{missing[0]}': name all of them again, or give "
            f"{setting('output', str(home))} without any."
        )
    with ExitStack() as stack:
        for directory in distinct([*(directories[name] for name in state.steps), home]):
            stack.enter_context(locked(directory))
        remove_run_leftovers(home)
        recover(state, directories)
    return state
