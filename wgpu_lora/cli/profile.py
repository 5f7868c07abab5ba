"""wgpu-lora profile: which kernels a training step's time goes to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wgpu_lora.cli.console import console, line, print_json
from wgpu_lora.cli.options import BaseDtype, Device, Json, Model
from wgpu_lora.errors import UserError

if TYPE_CHECKING:
    from wgpu_lora.bench.profile import Profile

Shape = Annotated[str | None, typer.Option(help="A real model's shape with made-up weights, such as qwen2.5-0.5b.")]
Layers = Annotated[int | None, typer.Option(help="Its first layers alone, for a device that cannot hold it whole.")]


def profile(
    model: Model = None,
    shape: Shape = None,
    layers: Layers = None,
    tokens: Annotated[int, typer.Option(help="Tokens of a row.")] = 512,
    batch: Annotated[int, typer.Option(help="Rows of the step.")] = 1,
    rank: Annotated[int, typer.Option(help="Rank of the adapter, on all seven projections.")] = 16,
    base_dtype: BaseDtype = "nf4",
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Recompute activations in the backward pass.")
    ] = False,
    rounds: Annotated[int, typer.Option(help="Steps that are measured.")] = 5,
    by_shape: Annotated[bool, typer.Option("--by-shape", help="A line for every shape of a kernel.")] = False,
    trace: Annotated[str | None, typer.Option(help="Chrome trace file to write, for Perfetto.")] = None,
    device: Device = None,
    as_json: Json = False,
) -> int:
    """Show which kernels a training step's time goes to.

    Every dispatch is timed by itself, beside whole steps as they are trained.
    """
    if rounds < 1:
        raise UserError(f"--rounds must be at least 1, not {rounds}.")
    if trace and not Path(trace).absolute().parent.is_dir():
        raise UserError(f"The directory of --trace {trace} does not exist: make it first.")
    from wgpu_lora.bench.header import header
    from wgpu_lora.bench.profile import SCHEMA, profile_step, write_trace
    from wgpu_lora.bench.step import TrainingStep, check_fits, chosen_model
    from wgpu_lora.gpu.device import Device as OpenedDevice
    from wgpu_lora.models.loaded import LoadedModel

    opened = chosen_model(model, shape, layers, OpenedDevice(device), base_dtype)

    def declared(of: LoadedModel) -> TrainingStep:
        return TrainingStep(of, batch, tokens, rank, gradient_checkpointing)

    check_fits(opened, lambda of: declared(of).session.memory().peak)
    step = declared(opened)
    try:
        step.allocate()
        found = profile_step(step, rounds)
    finally:
        step.close()
    count = opened.config.num_hidden_layers
    what = f"{opened.name}, {count} layers in {base_dtype}, {batch} x {tokens} tokens, rank {rank}"
    if trace:
        write_trace(Path(trace), found, what)
    if as_json:
        work = {"model": opened.name, "layers": count, "base_dtype": base_dtype, "batch": batch, "tokens": tokens}
        work |= {"rank": rank, "gradient_checkpointing": gradient_checkpointing}
        print_json(header(SCHEMA, opened.device, work=work) | found.as_dict(by_shape))
        return 0
    line("device", f"{opened.device.info.name}, {opened.device.info.driver}, {opened.device.info.backend}")
    line("step", what)
    console().print(_table(found, by_shape))
    _summary(found, batch * tokens)
    if trace:
        line("trace", f"{trace}; open it in https://ui.perfetto.dev")
    return 0


def _table(found: Profile, by_shape: bool) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("kernel", *(["shape"] if by_shape else [])):
        table.add_column(name, overflow="fold")
    for name in ("calls", "seconds", "share", "GFLOP/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for group in found.groups(by_shape):
        gflops = "" if group.gflops is None else f"{group.gflops:,.1f}"
        shape = [group.shape or ""] if by_shape else []
        table.add_row(group.kernel, *shape, f"{group.calls:,}", f"{group.seconds:.6f}", f"{group.share:.1%}", gflops)
    return table


def _summary(found: Profile, tokens: int) -> None:
    line("step", f"{found.step_seconds:.4f} s, {tokens / found.step_seconds:,.0f} tokens/s")
    clock = "the device's timestamps" if found.clock == "timestamps" else "the host's clock, waiting included"
    line("kernels", f"{found.attributed_seconds:.4f} s, {found.attributed_share:.1%} of the step, by {clock}")
    line("host", f"{found.host_share:.1%} of the step, when the device had nothing to do")
