"""wgpu-lora merge: base plus adapter as a standalone model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wgpu_lora.cli.console import Bar, TensorBar, line
from wgpu_lora.cli.options import Model, choice
from wgpu_lora.names.allowed import MERGED_DTYPES


def merge(
    adapter: Annotated[Path, typer.Option(help="PEFT adapter directory.")],
    output: Annotated[Path, typer.Option(help="Directory for the merged model; it must not exist yet.")],
    model: Model = None,
    dtype: Annotated[str, choice("Type of the written weights.", MERGED_DTYPES)] = "bf16",
) -> int:
    """Merge an adapter into its base, as a standalone model.

    It works tensor by tensor on the CPU: neither a GPU nor memory for the whole model is needed.
    """
    from wgpu_lora.atomic import check_new
    from wgpu_lora.export.merge import merge_adapter
    from wgpu_lora.formats.hub import resolve_model
    from wgpu_lora.infer.named import base_of
    from wgpu_lora.models.files import config_of

    check_new(output, "--output", directory=True)  # before the model may be downloaded
    named = model or base_of(adapter) or "demo"
    directory = resolve_model(named)
    with Bar("merging", len(config_of(directory).parameter_shapes())) as bar:
        merge_adapter(directory, adapter, output, dtype, name=named, events=TensorBar(bar))
    line("merged", f"{directory} and {adapter} into {output}, {dtype}")
    return 0
