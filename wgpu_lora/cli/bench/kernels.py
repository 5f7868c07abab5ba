"""wgpu-lora kernels: the shaders of a shape, and their texts as a device gets them."""

from __future__ import annotations

import difflib
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from wgpu_lora.cli import parameters
from wgpu_lora.cli.command import Command, Group
from wgpu_lora.cli.console import console, table
from wgpu_lora.cli.parameters import BaseDtype, Device
from wgpu_lora.errors import UserError
from wgpu_lora.names.text import count_noun
from wgpu_lora.weights.base_formats import DEFAULT_FORMAT

if TYPE_CHECKING:
    from wgpu_lora.bench.kernel_texts import KernelCall

Shape = Annotated[
    str,
    typer.Option(
        help="Shape of a real model, whose calls are shown, such as qwen3-8b.", autocompletion=parameters.shapes
    ),
]
DEFAULT_SHAPE = "qwen2.5-0.5b"

kernels = typer.Typer(
    cls=Group,
    name="kernels",
    help="Show the kernels of a shape, and their WGSL as a device gets it.",
    rich_markup_mode=None,
)


def _calls(shape: str, base_dtype: str, device: str | None) -> list[KernelCall]:
    from wgpu_lora.bench.kernel_texts import kernel_calls
    from wgpu_lora.gpu.device import Device as OpenedDevice

    return kernel_calls(shape, base_dtype, OpenedDevice(device))


@kernels.command("list", cls=Command)
def list_kernels(shape: Shape = DEFAULT_SHAPE, base_dtype: BaseDtype = DEFAULT_FORMAT, device: Device = None) -> None:
    """List the kernels of a training step, a prompt and decoding, with the tiling of each different call."""
    rows = []
    for name, calls in groupby(_calls(shape, base_dtype, device), lambda call: call.dispatch.kernel.name):
        for number, call in enumerate(calls, 1):
            grid = " x ".join(map(str, call.dispatch.groups))
            row = str(number), call.dispatch.tiling.label, grid, ", ".join(call.programs)
            rows.append(("" if number > 1 else name, *row))
    columns = ("kernel", "call", "tiling", "grid", "programs")
    console().print(table(columns, rows, text_columns=columns))


@kernels.command(cls=Command)
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A kernel, as 'wgpu-lora kernels list' names it.")],
    call: Annotated[int, typer.Option(help="Which of its calls; the first has the largest grid. [x>=1]")] = 1,
    tiling: Annotated[str | None, typer.Option(help="Another of its tilings, as the heading names them.")] = None,
    shape: Shape = DEFAULT_SHAPE,
    base_dtype: BaseDtype = DEFAULT_FORMAT,
    device: Device = None,
) -> None:
    """Print the WGSL of a kernel, under a heading of its formula, bindings, tiling and grid.

    The tiling is the device's default, whatever was tuned.
    """
    from wgpu_lora.bench.kernel_texts import kernel_text

    calls = _calls(shape, base_dtype, device)
    calls_of_kernel = [candidate for candidate in calls if candidate.dispatch.kernel.name == name]
    if not calls_of_kernel:
        names = list(dict.fromkeys(candidate.dispatch.kernel.name for candidate in calls))
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        advice = f"did you mean {' or '.join(close)}?" if close else "'wgpu-lora kernels list' names them."
        raise UserError(f"{shape} in {base_dtype} has no kernel '{name}': {advice}")
    if not 1 <= call <= len(calls_of_kernel):
        count = count_noun(len(calls_of_kernel), "call")
        raise UserError(f"--call {call} is not possible: {name} has {count} in {shape}.")
    kernel_call = calls_of_kernel[call - 1]
    dispatch, tilings = kernel_call.dispatch, {candidate.label: candidate for candidate in kernel_call.tilings}
    if tiling is not None:
        if tiling not in tilings:
            raise UserError(f"{name} has no tiling '{tiling}' here: choose one of {', '.join(tilings)}.")
        dispatch = dispatch.tiled(tilings[tiling])
    print(kernel_text(dispatch, list(tilings.values())), end="")
