"""Several adapters on one frozen base model: a job with several slots, for the command line and Python."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wgpu_lora.atomic import replace_directory
from wgpu_lora.errors import UserError
from wgpu_lora.events import Events
from wgpu_lora.memory_leases import budget_bytes
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.paths import working_folder
from wgpu_lora.track.trackers import check_libraries
from wgpu_lora.train.adapter_tasks import AdapterTask, check_apart, named_apart, request_of
from wgpu_lora.train.finetune import (
    Job,
    locked,
    prepare_run,
    prepare_session,
    replan_run,
    with_base_dtype,
    with_stored_dtype,
)
from wgpu_lora.train.loop.slot_policy import POLICIES, make_policy, policy_state
from wgpu_lora.train.loop.trainer import Trainer
from wgpu_lora.train.memory import check_adapters
from wgpu_lora.train.options.training_arguments import CHANGEABLE_ON_RESUME, LENGTH_OPTIONS, TrainingArguments
from wgpu_lora.train.run import run_checkpoint, training_log
from wgpu_lora.train.run.adapter_run import AdapterRun, memory_of
from wgpu_lora.train.run.pipeline_state import (
    PipelineState,
    difference,
    home_of,
    link_members,
    read_pipeline_state,
    write_pipeline_state,
)
from wgpu_lora.train.run.records import AdapterLosses, AdapterRecord, PipelineRecord, RunRecord
from wgpu_lora.train.run.resume import check_output_free
from wgpu_lora.train.run.run_checkpoint import LAST, NEXT, remove_run, sweep_run
from wgpu_lora.train.run.run_state import STATE, read_state
from wgpu_lora.train.run.stop_reasons import FINISHED, OUTCOMES, RESUMABLE
from wgpu_lora.train.run.teacher_setup import with_template_date
from wgpu_lora.train.run.trained_options import fit_length

BATCH_TOKENS = 1024  # of a shared batch, if no adapter's own is larger: enough to fill a GPU


@dataclass(repr=False)
class PipelineJob(Job[PipelineRecord]):
    """The runs of all adapters, in slots 0, 1, ...

    home: directory of the pipeline's record.
    """

    home: Path
    schedule: str
    batch_tokens: int
    args: TrainingArguments
    state: PipelineState

    def directories(self) -> list[Path]:
        return apart([*super().directories(), self.home])

    def record_directory(self) -> Path:
        return self.home

    def newest_state(self) -> Path | None:
        return self.home / STATE if (self.home / STATE).is_file() else None

    def begin(self, events: Events) -> None:
        if self.args.overwrite:
            remove_run(self.home)

    def finish(self, events: Events) -> PipelineRecord:
        policy = make_policy(self.schedule, self.state.policy or None)
        trainer = PipelineTrainer(
            self.session,
            self.runs,
            events,
            policy,
            self.state.step,
            requests=self.requests,
            home=self.home,
            state=self.state,
        )
        trainer.end(self.state.ended)
        trainer.train()
        return write_pipeline(self.home, trainer, self.args, self.schedule, self.batch_tokens)


def prepare_pipeline(
    args: TrainingArguments,
    tasks: Sequence[AdapterTask],
    schedule: str = "synchronized",
    batch_tokens: int | None = None,
    model: LoadedModel | None = None,
    *,
    planning: bool = False,
) -> PipelineJob:
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
    tasks = named_apart(tasks)
    _check(args, tasks, schedule, batch_tokens)
    if not planning:
        check_libraries(args.report_to)
    home = _home(args, tasks)
    per_task = [task.arguments(args) for task in tasks]
    state = PipelineState()
    if args.resume:
        state = _recovered(home, tasks)
    elif not planning:
        for directory in apart([home, *(Path(task.checkpoint) for task in tasks)]):
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

    def replan(changes: Mapping[str, Any]) -> int:
        new_runs = [replan_run(run, changes) for run in runs]
        new_tokens = _batch_tokens(new_runs, schedule, batch_tokens)
        return (
            prepare_session(with_base_dtype(model, new_runs[0].args.base_dtype), new_runs, batch_tokens=new_tokens)
            .memory()
            .peak_device_bytes
        )

    return PipelineJob(
        prepare_session(model, runs, batch_tokens=tokens), runs, replan, home, schedule, tokens, args, state
    )


def _home(args: TrainingArguments, tasks: Sequence[AdapterTask]) -> Path:
    """The directory of the pipeline's record."""
    first = Path(tasks[0].checkpoint)
    directory = args.directory if args.output else first
    return (home_of(directory) or directory) if args.resume else directory


def apart(directories: Sequence[Path]) -> list[Path]:
    """The directories, without duplicates."""
    return list({directory.resolve(): directory for directory in directories}.values())


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
    check_apart(tasks)


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


def _recovered(home: Path, tasks: Sequence[AdapterTask]) -> PipelineState:
    state = read_pipeline_state(home)
    directories = {task.name: Path(task.checkpoint) for task in tasks}
    missing = [name for name in state.steps if name not in directories]
    if missing:
        raise UserError(
            f"The pipeline in {home} also has an adapter '{missing[0]}': name all of them again, or give "
            f"{setting('output', str(home))} without any."
        )
    with ExitStack() as stack:
        for directory in apart([*(directories[name] for name in state.steps), home]):
            stack.enter_context(locked(directory))
        sweep_run(home)
        recover(state, directories)
    return state


def recover(state: PipelineState, directories: Mapping[str, Path]) -> None:
    """Bring every adapter's `last` to the step in the pipeline's state; directories: by name, locked.

    Raises:
        UserError: an adapter's checkpoint is missing, damaged, or of another step.
    """
    for name, step in state.steps.items():
        run_checkpoint.sweep_run(directories[name])
        last, following = directories[name] / LAST, directories[name] / NEXT
        if (
            following.is_dir()
            and not run_checkpoint.checkpoint_damage(following)
            and read_state(following)[0].step == step
        ):
            replace_directory(following, last)
        if not last.is_dir() or run_checkpoint.check(last)[0].step != step:
            raise UserError(
                f"Adapter '{name}' has no checkpoint of step {step} in {directories[name]}: restore the directory that "
                "the pipeline wrote, or give its new path."
            )
        shutil.rmtree(following, ignore_errors=True)


@dataclass
class PipelineTrainer(Trainer):
    """Saves the checkpoints of all slots together. home: directory of the pipeline's `state`."""

    home: Path = field(kw_only=True)
    state: PipelineState = field(kw_only=True)

    def save_due(self) -> bool:
        first_best = not self.state.steps and any(run.state.best_step for run in self.runs)  # best/ has no others
        interval = self.runs[0].args.save_steps
        return first_best or self.overdue() or (bool(interval) and self.step % interval == 0)

    def save_epoch(self, run: AdapterRun, number: int) -> None:
        run.save_epoch(self.session, number)

    def save(self) -> None:
        state = replace(
            self.state,
            step=self.step,
            policy=policy_state(self.policy),
            steps={run.adapter_name: run.state.step for run in self.runs},
            ended={p.run.adapter_name: p.ended for p in self.all if p.ended and p.ended not in RESUMABLE},
        )
        moved = [run for run in self.runs if self.state.steps.get(run.adapter_name) != run.state.step]
        for run in moved:
            run.write_checkpoint(self.session, run.directory / NEXT)
        write_pipeline_state(self.home, state)
        link_members(self.home, (run.directory for run in self.runs))
        for run in moved:
            replace_directory(run.directory / NEXT, run.directory / LAST)
            self.events.saved(run.directory / LAST, run.state.step, run.adapter_name)
        self.state = state


def write_pipeline(
    directory: Path, trainer: Trainer, args: TrainingArguments, schedule: str, batch_tokens: int
) -> PipelineRecord:
    """Write pipeline.json; returns its contents."""
    session = trainer.session
    record = PipelineRecord(
        step=trainer.step,
        signal=trainer.signal,
        schedule=schedule,
        batch_tokens=batch_tokens,
        options=args,
        adapters=[_adapter_record(run, trainer.records[run.slot]) for run in trainer.runs],
        memory=memory_of(session),
        environment=training_log.environment(session.device),
    )
    record.write(directory)
    return record


def _adapter_record(run: AdapterRun, record: RunRecord) -> AdapterRecord:
    state = record.state
    return AdapterRecord(
        slot=run.slot,
        name=run.adapter_name,
        data=record.data,
        checkpoint=str(run.directory),
        stop_reason=record.stop_reason,
        step=state.step,
        total_steps=state.total_steps,
        tokens=state.tokens,
        seconds=state.seconds,
        losses=AdapterLosses(state.last_loss, state.first_eval_loss, state.last_eval_loss, state.best_eval_loss),
        trainable_parameters=record.trainable_parameters,
        adapter_sha256=record.adapter_sha256,
        warnings=record.warnings,
    )
