"""wgpu-lora evaluate: the loss of a data file."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from wgpu_lora.cli.console import Bar, line, print_json
from wgpu_lora.cli.options import Adapter, BaseDtype, Device, Json, Model


def evaluate(
    data: Annotated[str, typer.Option(help="JSONL file, or a folder with valid.jsonl or train.jsonl.")],
    model: Model = None,
    adapter: Adapter = None,
    max_length: Annotated[int, typer.Option(help="Tokens of a row at most.")] = 1024,
    on_overflow: Annotated[str, typer.Option(help="What happens to longer rows: truncate or drop.")] = "truncate",
    completion_only_loss: Annotated[bool, typer.Option(help="Count answers only.")] = True,
    enable_thinking: Annotated[bool | None, typer.Option(help="Passed to the chat template.")] = None,
    device: Device = None,
    base_dtype: BaseDtype = "nf4",
    as_json: Json = False,
) -> int:
    """Measure loss and perplexity on a JSONL file."""
    from wgpu_lora.api import base_of, load
    from wgpu_lora.api import evaluate as measure

    base = base_of(adapter) if adapter else None
    opened = load(model or base or "demo", device=device, base_dtype=base_dtype)
    with Bar("loading", len(opened.checkpoint.names())) as bar:
        found = measure(
            opened,
            data,
            adapter=adapter,
            max_length=max_length,
            on_overflow=on_overflow,
            completion_only_loss=completion_only_loss,
            enable_thinking=enable_thinking,
            progress=lambda name: bar.advance(),
        )
    if as_json:
        print_json(asdict(found))
    else:
        line("loss", f"{found.loss:.6f}, perplexity {found.perplexity:.4f}")
        line("over", f"{found.tokens:,} trained tokens of {found.rows:,} rows in {found.seconds:.1f} s")
    return 0
