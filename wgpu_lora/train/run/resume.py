"""Resuming a run: its options, which of them may change, and how far it continues."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.names.spelling import any_option, flag, setting
from wgpu_lora.names.text import count_noun
from wgpu_lora.train.lr_schedule import LR_SCHEDULES, learning_rate, warmup_steps
from wgpu_lora.train.options.training_arguments import (
    CHANGEABLE_ON_RESUME,
    LENGTH_OPTIONS,
    PATHS,
    TrainingArguments,
    from_values,
)
from wgpu_lora.train.run import run_checkpoint
from wgpu_lora.train.run.checkpoint_store import EVIDENCE, PLAIN_FILES, CheckpointStore
from wgpu_lora.train.run.multi_adapter_state import MEMBER, home_of, read_multi_adapter_state
from wgpu_lora.train.run.records import PIPELINE, RUN, check_registered
from wgpu_lora.train.run.run_state import STATE, RunState, step_budget
from wgpu_lora.train.session.data_stream import DataStream
from wgpu_lora.train.session.rollout_stream import stream_of

UNTIMED_STEPS = 100  # assumed by a timed run's schedule until steps have been timed
MAY_CHANGE = sorted((CHANGEABLE_ON_RESUME | set(LENGTH_OPTIONS)) - {"resume", "overwrite"})


def resumed_options(explicit: Mapping[str, Any], directory: Path, where: str) -> TrainingArguments:
    """The options of the run or pipeline in a directory, updated by explicit options that may change.

    Raises:
        UserError: there is no run to resume, its checkpoint is damaged, or an option contradicts the run's.
    """
    home = home_of(directory)
    if home:
        request = read_multi_adapter_state(home).request
        return merge_resumed_options(explicit, request.get("options"), request.get("directory"), home, where)
    newest = run_checkpoint.latest_checkpoint(directory)
    if newest is None:
        raise no_checkpoint_error(directory)
    run_checkpoint.check(newest)
    metadata = run_checkpoint.read_metadata(newest)
    return merge_resumed_options(explicit, metadata.get("options"), metadata.get("directory"), directory, where)


def merge_resumed_options(
    explicit: Mapping[str, Any], options: Any, began_in: Any, directory: Path, where: str
) -> TrainingArguments:
    """Recorded options, updated by explicit options that may change.

    Args:
        options, began_in: recorded options, and the working directory that their relative paths refer to.
    """
    if not isinstance(options, dict):
        raise UserError(f"The record of the run in {directory} has no options: start again in another directory.")
    check_registered(options, directory)
    before = replace(from_values(options, f"The record of the run in {directory}"), overwrite=False)
    requested = from_values({name: value for name, value in explicit.items() if value is not None}, where, before)
    for name, value in asdict(requested).items():
        if name not in CHANGEABLE_ON_RESUME and name not in LENGTH_OPTIONS and value != getattr(before, name):
            raise option_changed_error(name, getattr(before, name), value)
    if requested.num_train_epochs != before.num_train_epochs and requested.max_steps == before.max_steps:
        requested = replace(requested, max_steps=-1)  # it would override the new number of epochs
    moved: dict[str, Any] = {
        name: resolve_recorded_path(began_in, getattr(requested, name))
        for name in PATHS
        if name not in {*explicit, "output"}
    }
    return replace(requested, resume=True, output=str(directory), **moved)


def resolve_recorded_path(began_in: Any, path: Any) -> Any:
    """A recorded path as seen from here; a relative one may refer to the directory where the run started.

    Records are untrusted: what cannot be a path is returned as it is, for whoever checks options.
    """
    if not isinstance(path, str) or not isinstance(began_in, str) or os.path.exists(path):
        return path
    absolute = os.path.join(began_in, path)
    return absolute if os.path.exists(absolute) else path


def no_checkpoint_error(directory: Path) -> UserError:
    if (directory / EVIDENCE).exists():
        return UserError(f"{directory} holds a protected run: continue it with {flag('protected')} JOB.toml.")
    return UserError(
        f"There is no checkpoint in {directory} to resume from: name a run's directory with {flag('output')}, or start "
        f"without {flag('resume')}."
    )


def option_changed_error(name: str, before: Any, now: Any) -> UserError:
    return UserError(
        f"{flag('resume')} needs the same options as the original run: {flag(name)} was {before!r}, not {now!r}; leave "
        f"it out, since only these may change: {', '.join(map(flag, MAY_CHANGE))}."
    )


def planned_options(
    options: Mapping[str, Any], args: TrainingArguments, directory: Path, storage: CheckpointStore = PLAIN_FILES
) -> TrainingArguments:
    """`args` with the planned length and the learning rate of the run from the record of the checkpoint in `directory`.

    Raises:
        UserError: the record does not have it, or it is invalid.
    """
    try:
        return from_values({name: options[name] for name in (*LENGTH_OPTIONS, "learning_rate")}, STATE, args)
    except (KeyError, UserError):
        raise run_checkpoint.damaged_checkpoint_error(
            directory, f"the options in {STATE} are invalid", storage
        ) from None


def recorded_rate(args: TrainingArguments, storage: CheckpointStore = PLAIN_FILES) -> float | None:
    """The learning rate that the newest checkpoint of a resumed run names where the options name none."""
    if not args.resume or args.learning_rate is not None:
        return None
    newest = run_checkpoint.latest_checkpoint(args.directory, storage)
    if newest is None:
        return None
    identity = run_checkpoint.check(newest, storage)[1]
    return planned_options(identity["options"], args, newest, storage).learning_rate


def resumed_total_steps(state: RunState, original: TrainingArguments, stream: DataStream) -> int:
    """Total steps of a resumed run, by its current options; the recorded number if these have not changed.

    Raises:
        UserError: the run has already exceeded them, or a time was exchanged for a number of steps.
    """
    args = stream.args
    changes = [name for name in LENGTH_OPTIONS if getattr(args, name) != getattr(original, name)]
    if not changes:
        return state.total_steps
    if bool(args.target_seconds) != bool(original.target_seconds):
        counts, time = any_option("num_train_epochs", "max_steps"), flag("target_seconds")
        old_unit, new_unit = (time, counts) if original.target_seconds else (counts, time)
        raise UserError(
            f"The run in {args.directory} was planned by {old_unit}, so {flag('resume')} cannot extend it by "
            f"{new_unit}: give a larger {old_unit}."
        )
    if args.target_seconds:
        if args.target_seconds < state.elapsed_seconds:
            raise UserError(
                f"The run in {args.directory} has already used {state.elapsed_seconds:,.1f} s, more than "
                f"{setting('target_seconds', args.target_seconds)}: give a larger value."
            )
        return step_budget(state, args, state.step_seconds) if state.step_seconds else state.step + UNTIMED_STEPS
    total = stream.total_steps()
    if total < state.step:
        settings = " and ".join(setting(name, getattr(args, name)) for name in changes)
        raise UserError(
            f"The run in {args.directory} has already taken {count_noun(state.step, 'step')}, more than the {total:,} "
            "of "
            f"{settings}: give a larger value."
        )
    return total


def resume_note(
    state: RunState,
    original: TrainingArguments,
    stream: DataStream,
    option_notes: Sequence[str] = (),
    extensible: bool = True,
) -> str:
    """A note on how a resumed run goes on, for the user.

    Args:
        extensible: whether a finished run can be continued with other options.
        option_notes: options of PLAN that the adapters file sets for it, which override those of all adapters.

    Raises:
        UserError: as `resumed_total_steps`.
    """
    args, total = stream.args, resumed_total_steps(state, original, stream)
    if args.target_seconds:
        remaining = args.target_seconds - state.elapsed_seconds
        if remaining < state.step_seconds / 2 or 0 < args.max_steps <= state.step:
            return "already finished" + (f"; a larger {flag('target_seconds')} extends it" if extensible else "")
        text = f"continues after step {state.step:,}, for {remaining:,.1f} s more"
        if args.target_seconds == original.target_seconds or LR_SCHEDULES[args.lr_scheduler_type].decay is None:
            return text
        return f"{text}: the {args.lr_scheduler_type} schedule is now that of {args.target_seconds:g} s"
    text = f"continues after step {state.step:,} of {state.total_steps:,}"
    if total == state.total_steps:
        option_text = any_option("num_train_epochs", "max_steps")
        if option_notes:
            names = " or ".join(repr("epochs" if name == LENGTH_OPTIONS[0] else name) for name in option_notes)
            option_text = f"{names} in the adapters file"
        end = "already finished" + (f"; a larger {option_text} extends it" if extensible else "")
        return end if state.step >= total else text
    text += f", up to {total:,} steps"
    kind = args.lr_scheduler_type
    if args.lr_scheduler_restart:
        remaining = total - state.step
        rate = learning_rate(
            kind, args.rate, 0, remaining, warmup_steps(remaining, args.warmup_ratio, args.warmup_steps)
        )
        return f"{text}: the {kind} schedule starts anew, so the next learning rate is {rate:.2e}"
    warm = [warmup_steps(count, args.warmup_ratio, args.warmup_steps) for count in (state.total_steps, total)]
    schedule = LR_SCHEDULES[kind]
    if schedule.decay is None and (not schedule.warms_up or warm[0] == warm[1]):
        return f"{text}, with the same result as a single run of {total:,} steps"
    rate = learning_rate(kind, args.rate, state.step, total, warm[1], args.lr_scheduler_min)
    return (
        f"{text}: the {kind} schedule is now that of {total:,} steps, so the next learning rate is {rate:.2e} and the "
        "result differs from that of a single run (with a constant schedule, it would not)"
    )


def set_length(
    state: RunState,
    options: dict[str, Any],
    stream: DataStream,
    directory: Path,
    storage: CheckpointStore = PLAIN_FILES,
) -> None:
    """Set the total steps of a run that is resumed from a checkpoint whose record has these options.

    Raises:
        UserError: the state does not match the data, or as `resumed_total_steps`.
    """
    args = stream.args
    original = planned_options(options, args, directory, storage)
    total = state.total_steps if original.target_seconds else stream_of(stream.prepared, original).total_steps()
    older = total + (original.num_train_epochs % 1 > 0)  # earlier versions rounded some parts of epochs up
    if state.total_steps not in (total, older):
        wrong = f"{STATE} says {state.total_steps} steps in total, but there are {total}"
    elif state.step > total and not original.target_seconds:
        wrong = f"{STATE} says step {state.step} of {total}"
    elif stream.position(state.step) != (state.epoch, state.index) or len(state.pending) > state.step:
        wrong = f"{STATE} says step {state.step}, epoch {state.epoch} and index {state.index}"
    else:
        total = resumed_total_steps(state, original, stream)
        if args.lr_scheduler_restart and not args.target_seconds and total != state.total_steps:
            state.schedule_start = state.step
        state.total_steps = total
        state.ending = state.ending and args.target_seconds == original.target_seconds
        return
    raise run_checkpoint.damaged_checkpoint_error(directory, wrong, storage)


def check_output_free(directory: Path, storage: CheckpointStore = PLAIN_FILES, overwrite: bool | None = None) -> None:
    """Raise UserError if a run or a pipeline has left anything worth keeping in a directory; a log alone is not.

    overwrite: whether it may be removed; None if nobody could ask for that.
    """
    if storage is PLAIN_FILES and (directory / EVIDENCE).exists():
        raise UserError(f"The output directory {directory} already holds a protected run: choose another directory.")
    if overwrite:
        return
    over = "" if overwrite is None else f", begin over with {setting('overwrite', True)}"
    resume = setting("resume", True)
    if any((directory / name).exists() for name in (PIPELINE, STATE, MEMBER)):
        raise UserError(
            f"The directory {directory} already belongs to a pipeline: continue it with {resume}{over}, or choose "
            "another directory."
        )
    if run_checkpoint.latest_checkpoint(directory, storage):
        raise UserError(
            f"The output directory {directory} already holds a run: continue it with {resume}{over}, or choose another "
            "directory."
        )
    if any((directory / name).exists() for name in (RUN, "adapter_config.json")):
        raise UserError(
            f"The output directory {directory} already holds an adapter, without a checkpoint to continue from: choose "
            f"another directory{over or ', or remove this one'}."
        )
