"""From options to the run of one slot: rows, batches, adapter and starting point."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from wgpu_lora.data import Source, TokenizedData
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.tiling import Capabilities
from wgpu_lora.models.adapter_set import SlotSpec
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.train.init_methods import offsets
from wgpu_lora.train.objective_eval import open_unrounded_model
from wgpu_lora.train.objectives import objective_of
from wgpu_lora.train.objectives.grpo import GRPO
from wgpu_lora.train.objectives.objective import Objective
from wgpu_lora.train.options.training_arguments import LENGTH_OPTIONS, TrainingArguments
from wgpu_lora.train.rewards.function_process import Tools
from wgpu_lora.train.rewards.reward_functions import RewardFunctions
from wgpu_lora.train.run import run_checkpoint
from wgpu_lora.train.run.adapter_init import (
    check_reference_base,
    check_residual,
    frozen_adapter,
    init_from_reference,
    initial_adapter,
)
from wgpu_lora.train.run.adapter_run import AdapterRun
from wgpu_lora.train.run.checkpoint_store import PLAIN_FILES, CheckpointStore
from wgpu_lora.train.run.resume import planned_options, recorded_rate, resume_note
from wgpu_lora.train.run.run_checkpoint import Trainable
from wgpu_lora.train.run.teacher_setup import check_caches, live_teacher, with_cached_length, with_template_date
from wgpu_lora.train.run.trained_options import fit_length, shortened
from wgpu_lora.train.run.trained_weights import TrainableAdapter, TrainableQuantScales
from wgpu_lora.train.session.data_stream import DataStream, group_lengths
from wgpu_lora.train.session.rollout_stream import RolloutStream, completion_batches, stream_of
from wgpu_lora.train.session.rollouts import Rollouts
from wgpu_lora.train.session.tool_turns import ToolTurns
from wgpu_lora.train.training_data import default_batches, read_rows, sources_of, tools_of


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
    args, trainable = trainable_for(args, model, storage)
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
    of_teacher = teacher, teacher.digest() if teacher else cached
    return AdapterRun(
        slot, args, trainable, stream, heldout, *digests, name, tuple(notes), reference, *of_teacher, storage=storage,
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
