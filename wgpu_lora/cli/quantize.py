"""wgpu-lora quantize: a base in few bits, as a model of its own."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from wgpu_lora.cli.completion import MODEL
from wgpu_lora.cli.console import Bar, console, line, print_json, table
from wgpu_lora.cli.options import Device, Json, choice
from wgpu_lora.errors import UserError
from wgpu_lora.events import Evaluating, Events
from wgpu_lora.names.naming import flag
from wgpu_lora.weights.schemes import GROUPS, KINDS

SCHEMES = ("nf4", *reversed(KINDS.values()))
LOW_BIT = tuple(KINDS.values())


class _Shown(Events):
    """A bar for each part of the work, one after the other."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._shown = ""

    def _show(self, text: str, done: float, total: float, unit: str = "") -> None:
        if self._bar is None or text != self._shown or done <= 1:
            self.close()
            self._bar, self._shown = Bar(text, total, unit), text
        self._bar.advance(to=done, total=total)

    def loading(self, model: str, tensor: str, done: int, total: int) -> None:
        self._show("loading", done, total)

    def evaluating(self, evaluating: Evaluating) -> None:
        self._show("passing rows", evaluating.rows, evaluating.total, " rows")

    def written(self, tensor: str, done: int, total: int) -> None:
        self._show("writing", done, total)

    def close(self) -> None:
        if self._bar:
            self._bar.close()
            self._bar = None


def quantize(
    output: Annotated[Path, typer.Option(help="Directory for the quantised model; it must not exist yet.")],
    model: Annotated[
        str | None,
        typer.Option(help="Model in full precision: directory, GGUF file, hub id or 'demo'.", autocompletion=MODEL),
    ] = None,
    from_base: Annotated[
        str | None,
        typer.Option(help="Model that is quantised already, to be quantised in another scheme.", autocompletion=MODEL),
    ] = None,
    scheme: Annotated[str | None, choice("Format of all linear layers.", SCHEMES)] = None,
    mlp: Annotated[str | None, choice("Format of the MLP, with --attention.", LOW_BIT)] = None,
    attention: Annotated[str | None, choice("Format of attention, with --mlp.", LOW_BIT)] = None,
    group: Annotated[
        str | None,
        choice("Inputs that share a scale, or 'row': a table alone. Default: 32.", (*map(str, GROUPS), "row")),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(help="Rows whose activations say how much each input counts: file, folder or hub id."),
    ] = None,
    calibration_samples: Annotated[int, typer.Option(help="Rows of --calibration to use. [x>=1]")] = 128,
    eval_data: Annotated[
        str | None, typer.Option(help="Rows to measure the perplexity on, before and after: file, folder or hub id.")
    ] = None,
    device: Device = None,
    as_json: Json = False,
) -> int:
    """Quantise a model and save it, for every command's --model.

    lut4, lut3 and lut2 have a table of values per row, fitted on the GPU by k-means, and a scale per group. Other
    commands quantise a model in the same way while they load it, with --base-dtype.
    """
    from wgpu_lora.api.quantizing import format_name
    from wgpu_lora.api.quantizing import quantize as quantized

    if (model is None) == (from_base is None):
        raise UserError(f"Give the model either as {flag('model')} or, if it is quantised, as {flag('from_base')}.")
    name = format_name(scheme, mlp, attention, group)
    shown = _Shown()
    try:
        found = quantized(
            model or from_base or "",
            name,
            output,
            device=device,
            requantize=from_base is not None,
            calibration=calibration,
            calibration_samples=calibration_samples,
            eval_data=eval_data,
            events=shown,
        )
    finally:
        shown.close()
    if as_json:
        kinds = [asdict(one) | {"bits": one.bits, "error": one.error} for one in found.kinds]
        print_json({**asdict(found), "output": str(output), "kinds": kinds})
        return 0
    columns = ("layers", "scheme", "matrices", "bits per weight", "relative error")
    rows = [
        (one.kind, ", ".join(one.schemes), f"{one.matrices:,}", f"{one.bits:.2f}", f"{one.error:.6f}")
        for one in found.kinds
    ]
    console().print(table(columns, rows, left=("layers", "scheme")))
    if found.before is not None and found.after is not None:
        line("perplexity", f"{found.before:.4f} before, {found.after:.4f} after")
    line("quantised", f"{model or from_base} to {name} in {found.seconds:.1f} s")
    line("written", f"{output}, {found.nbytes:,} bytes of weights")
    return 0
