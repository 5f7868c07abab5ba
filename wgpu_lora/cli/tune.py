"""wgpu-lora tune: times kernel tilings ahead of a run."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from wgpu_lora.cli.console import line
from wgpu_lora.cli.finetune import Adapters, AdaptersConfig, BatchTokens, Schedule
from wgpu_lora.cli.options import refuse_idle
from wgpu_lora.cli.plan import Shape, job_of
from wgpu_lora.cli.starting import Starting
from wgpu_lora.errors import UserError
from wgpu_lora.train.options.arguments import TrainingArguments


def tune(
    args: TrainingArguments,
    note: str | None,
    adapters: Adapters = None,
    adapters_config: AdaptersConfig = None,
    schedule: Schedule = "synchronized",
    batch_tokens: BatchTokens = None,
    shape: Shape = None,
    seconds: Annotated[float, typer.Option(help="Limit of tuning, in seconds. [x>0]")] = 300,
    clear: Annotated[bool, typer.Option("--clear", help="Forget what was timed and checked on the device.")] = False,
) -> int:
    """Time the kernel tilings of a run ahead, and keep the fastest.

    The options are those of 'finetune'. Sizes that a run had no time for are timed too; --retune times all again. No
    weights are loaded.
    """
    from wgpu_lora.gpu.tuner import Tuner
    from wgpu_lora.share import claim

    if not 0 < seconds < math.inf:
        raise UserError(f"--seconds is {seconds:g}: give a number of seconds greater than 0.")
    if not args.tune:
        raise UserError("--no-tune contradicts 'wgpu-lora tune': leave it out.")
    job = job_of(args, adapters, adapters_config, schedule, batch_tokens, shape)
    session, programs = job.session, job.session.programs()
    tuner, watcher = Tuner(session.device, seconds, retune=args.retune, thorough=True), Starting(job)
    if not tuner.estimate(programs).sizes:
        line("tuned", "every kernel size of this run was timed before; --retune times them again")
    else:
        with claim(session.device, session.needs(), "tune"):
            tuner.tune(programs, watcher)
    line("tilings", str(tuner.file.path), whole=True)
    return 0


def cleared(ctx: typer.Context, given: dict[str, Any], recipe: str | None, values: dict[str, Any]) -> int | None:
    """The exit code of --clear; None without it."""
    if not values["clear"]:
        return None
    from wgpu_lora.gpu.choices import ChoiceFile
    from wgpu_lora.gpu.device import Device

    refuse_idle(ctx, ctx.params.keys() - {"clear", "device"}, "with --clear")
    file = ChoiceFile(Device(given.get("device")))
    file.clear()
    line("cleared", str(file.path), whole=True)
    return 0
