"""Options that were given but do nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any

from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.train.lr_schedule import LR_SCHEDULES
from wgpu_lora.train.objectives import OBJECTIVES, objective_of
from wgpu_lora.train.optimizers import OPTIMIZERS
from wgpu_lora.train.options.training_arguments import TrainingArguments


def unused_options(explicit: Collection[str], args: TrainingArguments) -> list[str]:
    """A sentence for each explicit option that does nothing in `args`. As in transformers, this is not an error."""
    return [f"{flag(name)} does nothing: {why}." for name, why in idle_options(args) if name in explicit]


def idle_options(args: TrainingArguments) -> list[tuple[str, str]]:
    """The options that do nothing because of others, with the reasons."""
    result: list[tuple[str, str]] = []

    def say(names: Collection[str], holds: bool, why: str) -> None:
        result.extend((name, why) for name in names if holds)

    warms_up = LR_SCHEDULES[args.lr_scheduler_type].warms_up
    constant = setting("lr_scheduler_type", "constant_with_warmup")
    by_steps, by_time = args.max_steps > 0, args.target_seconds is not None
    say(
        ("warmup_ratio", "warmup_steps"),
        not warms_up,
        f"the learning rate is constant from the first step (use {constant})",
    )
    falls = LR_SCHEDULES[args.lr_scheduler_type].decay is not None
    say(("lr_scheduler_min",), not falls, f"{setting('lr_scheduler_type', args.lr_scheduler_type)} does not decay")
    if warms_up:
        say(("warmup_ratio",), args.warmup_steps > 0, f"{setting('warmup_steps', args.warmup_steps)} overrides it")
    if by_time:
        say(("num_train_epochs",), True, f"{setting('target_seconds', args.target_seconds)} sets the length of the run")
    else:
        say(("num_train_epochs",), by_steps, f"{setting('max_steps', args.max_steps)} overrides it")
    scales = args.train == "quant-scales"
    option_text = setting("train", args.train)
    say(
        ("lora_r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "init_lora_weights", "loraplus_lr_ratio"),
        scales,
        f"{option_text} trains no adapter",
    )
    say(("snap_steps", "rounded_from"), not scales, f"{option_text} rounds nothing")
    say(
        ("save_total_limit",),
        not (args.save_steps or args.save_minutes),
        f"with {setting('save_steps', 0)} and {setting('save_minutes', 0)} there is one checkpoint, at the end",
    )
    objective = objective_of(args)
    if objective.cut():
        of = setting("objective", args.objective)
        say(("completion_only_loss",), True, f"{of} is about answers only")
    for option, why in objective.idle().items():
        say((option,), True, why)
    for name, kinds in (("optim", OPTIMIZERS), ("objective", OBJECTIVES)):
        choice: str = getattr(args, name)
        own, all_options = _options(kinds[choice]), {option for kind in kinds.values() for option in _options(kind)}
        say(sorted(all_options - own), True, f"{setting(name, choice)} does not use it")
    return result


def _options(kind: Any) -> set[str]:
    """The options that an optimizer or an objective uses."""
    return {item.name for item in fields(kind)}
