"""wgpu-lora profile: the time of each kernel in a training step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wgpu_lora.cli.bench import Layers, Shape
from wgpu_lora.cli.console import Bar, console, line, print_json, table
from wgpu_lora.cli.parameters import BaseDtype, Device, Json, Model, is_given
from wgpu_lora.errors import UserError
from wgpu_lora.weights.base_formats import DEFAULT_FORMAT

if TYPE_CHECKING:
    from wgpu_lora.bench.step_profile import Profile
    from wgpu_lora.train.options.training_arguments import TrainingArguments
    from wgpu_lora.train.run.records import RunRecord

Run = Annotated[
    Path | None,
    typer.Option(
        help="Directory of a finished run, for its model, batch size and options; options given here override them.",
        metavar="DIR",
    ),
]


def profile(
    ctx: typer.Context,
    run: Run = None,
    model: Model = None,
    shape: Shape = None,
    layers: Layers = None,
    tokens: Annotated[int, typer.Option(help="Tokens per row. [x>=2]")] = 512,
    batch: Annotated[int, typer.Option(help="Rows per step. [x>=1]")] = 1,
    rank: Annotated[int, typer.Option(help="LoRA rank, on all linear layers. [x>=1]")] = 16,
    base_dtype: BaseDtype = DEFAULT_FORMAT,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Recompute activations in the backward pass.")
    ] = False,
    rounds: Annotated[int, typer.Option(help="Number of steps to measure. [x>=1]")] = 5,
    by_shape: Annotated[bool, typer.Option("--by-shape", help="Show a line for every shape of a kernel.")] = False,
    trace: Annotated[str | None, typer.Option(help="Chrome trace file to write, for Perfetto.")] = None,
    device: Device = None,
    as_json: Json = False,
) -> int:
    """Show the time of each kernel in a training step.

    Every kernel call is timed by itself; whole training steps are timed as well.
    """
    if rounds < 1:
        raise UserError(f"--rounds must be at least 1, not {rounds}.")
    if trace:
        from wgpu_lora.files.atomic import check_file

        check_file(Path(trace), "--trace")
    from wgpu_lora.bench.brick_results import header
    from wgpu_lora.bench.step_profile import SCHEMA, described, profile_step, write_trace
    from wgpu_lora.bench.training_step import TRAINING, TrainingStep, benchmark_option_names, chosen_model
    from wgpu_lora.gpu.device import Device as OpenedDevice
    from wgpu_lora.train.run.records import RunRecord

    if run and (model or shape):
        raise UserError(f"--run and {'--model' if model else '--shape'} are both given: leave one of them out.")
    record = RunRecord.read(run) if run else None
    sizes = {"base_dtype": base_dtype, "batch": batch, "tokens": tokens, "rank": rank}
    with benchmark_option_names(TRAINING):
        args = _arguments(ctx, record, sizes | {"gradient_checkpointing": gradient_checkpointing})
        model, device = (args.model, device or args.device) if record else (model, device)
        opened = chosen_model(model, shape, layers, OpenedDevice(device), args.base_dtype)
        step = TrainingStep.fitting(opened, args)
    # Tilings of another device are of no use.
    is_same_device = record and opened.device.info.name == record.environment.device.name
    choices = record.state.tiles if record and is_same_device else {}
    try:
        with Bar("profiling", rounds, " rounds") as bar:
            bar.advance("loading the weights and compiling the kernels", 0)
            step.allocate(choices)
            result = profile_step(step, rounds, lambda: bar.advance("profiling"))
    finally:
        step.close()
    work = {
        "model": opened.name,
        "base_digest": opened.checkpoint.digest(),
        "layers": opened.config.num_hidden_layers,
        "whole": layers is None,
        "base_dtype": args.base_dtype,
        "batch": args.batching[1],
        "tokens": args.length,
        "rank": args.lora_r,
        "gradient_checkpointing": args.gradient_checkpointing,
        "target_modules": args.target_modules,
        "compute_dtype": args.compute_dtype,
        "tiles": "of the run" if choices else "default",
    }
    description = described(work)
    if trace:
        write_trace(Path(trace), result, description)
    if as_json:
        print_json(header(SCHEMA, opened.device, work=work) | result.as_dict(by_shape))
        return 0
    line("device", f"{opened.device.info.name}, {opened.device.info.driver}, {opened.device.info.backend}")
    line("step", description)
    console().print(_table(result, by_shape))
    _summary(result)
    if trace:
        line("trace", f"{trace}; open it in https://ui.perfetto.dev")
    return 0


def _arguments(ctx: typer.Context, record: RunRecord | None, sizes: dict[str, Any]) -> TrainingArguments:
    """The options of the step: of the command line, or of a run, except for those given on the command line."""
    from wgpu_lora.bench.step_profile import trained_sizes
    from wgpu_lora.bench.training_step import training_options
    from wgpu_lora.train.options.training_arguments import TrainingArguments

    if record is None:
        return TrainingArguments(**training_options(sizes))
    rows, tokens = trained_sizes(record)
    options = training_options({name: value for name, value in sizes.items() if is_given(ctx, name)})
    return replace(record.options, **{"per_device_train_batch_size": rows, "max_length": tokens, **options})


def _table(profile: Profile, by_shape: bool) -> Any:
    from wgpu_lora.cli.bench.brick_tables import duration

    text_columns = ("kernel", "shape") if by_shape else ("kernel",)
    rows = []
    for group in profile.groups(by_shape):
        gflops = "" if group.gflops is None else f"{group.gflops:,.1f}"
        shape = [group.shape or ""] if by_shape else []
        rows.append((group.kernel, *shape, f"{group.calls:,}", duration(group.seconds), f"{group.share:.1%}", gflops))
    return table((*text_columns, "calls", "time", "share", "GFLOP/s"), rows, text_columns)


def _summary(profile: Profile) -> None:
    from wgpu_lora.cli.bench.brick_tables import duration
    from wgpu_lora.cli.finetune import speed

    spread = f" (steps vary by {profile.step_spread / profile.step_seconds:.0%})" if profile.rounds > 1 else ""
    line(
        "step",
        f"{duration(profile.step_seconds)}{spread}, {speed(profile.trained, profile.tokens, profile.step_seconds)}",
    )
    clock = "the device's timestamps" if profile.clock == "timestamps" else "the host's clock, including waiting"
    text = f"{duration(profile.attributed_seconds)}, each call timed alone by {clock}; shares are of this sum"
    line("kernels", text + ("" if profile.attributed_share else "; together in a step they take less"))
    line("the rest", _idle_time(profile))


def _idle_time(profile: Profile) -> str:
    """How long the device waits for the host."""
    from wgpu_lora.cli.bench.brick_tables import duration

    if profile.host_share is not None:
        idle = profile.step_seconds - profile.device_seconds
        return f"{duration(idle)}, {profile.host_share:.1%} of the step: the device waits for the host, or for data"
    if profile.clock == "host":
        return "not known: this device has no timestamps to separate computing from waiting"
    return "too little to measure: less than the variation of the steps"
