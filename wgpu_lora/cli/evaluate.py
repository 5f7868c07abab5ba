"""wgpu-lora evaluate: the loss of a data file."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from wgpu_lora.cli.console import Bar, line, print_json
from wgpu_lora.cli.options import Adapter, BaseDtype, Device, Json, Model
from wgpu_lora.cli.several import as_rows, show_losses


def evaluate(
    data: Annotated[str, typer.Option(help="JSONL file, or a folder with valid.jsonl or train.jsonl.")],
    model: Model = None,
    adapter: Adapter = None,
    compare: Annotated[bool, typer.Option("--compare", help="Measure the base beside every adapter.")] = False,
    max_length: Annotated[int, typer.Option(help="Tokens of a row at most.")] = 1024,
    on_overflow: Annotated[str, typer.Option(help="What happens to longer rows: truncate or drop.")] = "truncate",
    completion_only_loss: Annotated[bool, typer.Option(help="Count answers only.")] = True,
    enable_thinking: Annotated[bool | None, typer.Option(help="Passed to the chat template.")] = None,
    device: Device = None,
    base_dtype: BaseDtype = "nf4",
    as_json: Json = False,
) -> int:
    """Measure loss and perplexity on a JSONL file.

    Several adapters are loaded at once and measured in turn.
    """
    from wgpu_lora.api import evaluate as measure
    from wgpu_lora.api import evaluate_several, load
    from wgpu_lora.infer.named import model_of, named_adapters, slots_of

    adapters = named_adapters(adapter or [])
    several = compare or len(adapters) > 1
    if several:
        slots_of(adapters, compare)  # before anything is opened
    opened = load(model_of(adapters, model), device=device, base_dtype=base_dtype)
    options: dict[str, Any] = {
        "max_length": max_length,
        "on_overflow": on_overflow,
        "completion_only_loss": completion_only_loss,
        "enable_thinking": enable_thinking,
    }
    with Bar("loading", len(opened.checkpoint.names())) as bar:
        options["progress"] = lambda name: bar.advance()
        if several:
            losses = evaluate_several(opened, data, adapters, include_base=compare, **options)
        else:
            found = measure(opened, data, adapter=next(iter(adapters.values()), None), **options)
    if several:
        if as_json:
            print_json(as_rows(losses, adapters))
        else:
            show_losses(losses)
    elif as_json:
        info = opened.device.info
        device_facts = {"name": info.name, "driver": info.driver, "backend": info.backend}
        print_json(asdict(found) | {"device": device_facts})
    else:
        line("loss", f"{found.loss:.6f}, perplexity {found.perplexity:.4f}")
        line("over", f"{found.tokens:,} trained tokens of {found.rows:,} rows in {found.seconds:.1f} s")
    return 0
