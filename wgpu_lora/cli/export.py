"""wgpu-lora export: a model, a merged adapter, or an adapter alone, for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wgpu_lora.cli.commands import Command, Group
from wgpu_lora.cli.console import Bar, TensorBar, line
from wgpu_lora.cli.options import Model, choice
from wgpu_lora.errors import UserError
from wgpu_lora.names.allowed import GGUF_TYPES

export = typer.Typer(
    cls=Group, name="export", help="Write models and adapters for other programs.", rich_markup_mode=None
)


@export.command("gguf", cls=Command)
def gguf(
    output: Annotated[Path, typer.Option(help="GGUF file to write; it must not exist yet.")],
    model: Model = None,
    adapter: Annotated[Path | None, typer.Option(help="PEFT adapter directory to merge into the model.")] = None,
    quantize: Annotated[
        str | None,
        choice("Type of the matrices; f16 by default.", GGUF_TYPES),
    ] = None,
    lora: Annotated[
        bool, typer.Option("--lora", help="Write the adapter alone in f32, for llama.cpp's --lora.")
    ] = False,
) -> int:
    """Write a model or an adapter for llama.cpp.

    Weights, tokenizer, chat template and stop tokens go into one file, written tensor by tensor on the CPU: neither a
    GPU nor memory for the whole model is needed.
    """
    from wgpu_lora.export.gguf_adapter import export_adapter
    from wgpu_lora.export.gguf_model import export_model
    from wgpu_lora.formats.gguf.write import check_new_gguf
    from wgpu_lora.formats.hub import resolve_model
    from wgpu_lora.infer.named import base_of
    from wgpu_lora.models.files import config_of

    if lora and adapter is None:
        raise UserError("--lora writes an adapter alone: give it with --adapter DIR.")
    if lora and quantize:
        raise UserError("--quantize cannot be combined with --lora, which writes f32: leave one of them out.")
    check_new_gguf(output)  # before the model may be downloaded
    named = model or (base_of(adapter) if adapter else None) or "demo"
    path = resolve_model(named)
    if lora and adapter is not None:
        kind, source = "adapter, f32", f"{adapter}"
        written = export_adapter(path, adapter, output)
    else:
        kind = (quantize or "f16").lower()  # llama.cpp spells it Q4_K_M
        source = f"{path} and {adapter}" if adapter else f"{path}"
        with Bar("exporting", len(config_of(path).parameter_shapes())) as bar:
            # A hub id is a better name than the cache's directory.
            name = None if Path(named).exists() else named.rpartition("/")[2]
            written = export_model(path, output, kind, adapter, name, TensorBar(bar))
    line("exported", f"{source} into {output}")
    line("size", f"{written.nbytes:,} bytes, {kind}, {written.bits_per_weight:.2f} bits per weight")
    for note in written.notes:
        line("note", note)
    return 0
