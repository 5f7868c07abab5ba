"""wgpu-lora import: quantise a model once, and save the result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wgpu_lora.cli.completion import MODEL
from wgpu_lora.cli.console import Bar, TensorBar, line
from wgpu_lora.cli.options import Device


def import_model(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Model directory, GGUF file, hub id, or 'demo'.", autocompletion=MODEL),
    ],
    output: Annotated[Path, typer.Option(help="Directory for the packed model; it must not exist yet.")],
    device: Device = None,
) -> int:
    """Quantise a model to NF4 and save it.

    The linear layers are quantised on the GPU and saved in bitsandbytes' format, which transformers loads too.
    For other formats, see quantize.
    """
    from wgpu_lora.atomic import check_new
    from wgpu_lora.export.packed import write_packed
    from wgpu_lora.models.loaded import open_model

    check_new(output, "--output", directory=True)  # before the model may be downloaded
    opened = open_model(model, device)
    with Bar("packing", opened.tensors_to_load() + len(opened.config.parameter_shapes())) as bar:
        write_packed(opened, output, events=TensorBar(bar))
    nbytes = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    line("packed", f"{opened.name} into {output}, {nbytes:,} bytes of weights")
    return 0
