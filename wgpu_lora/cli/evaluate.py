"""wgpu-lora evaluate: the loss of a data file."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from wgpu_lora.bounded import printable
from wgpu_lora.cli.console import Bar, line, print_json
from wgpu_lora.cli.options import Adapter, BaseDtype, Device, Json, Model
from wgpu_lora.cli.several import as_rows, show_losses
from wgpu_lora.errors import NotFiniteError


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
    from wgpu_lora.infer.named import BASE, model_of, named_adapters, slots_of

    adapters = named_adapters(adapter or [])
    several = compare or len(adapters) > 1
    if several:
        slots_of(adapters, compare)  # before anything is opened
    options: dict[str, Any] = {
        "max_length": max_length,
        "on_overflow": on_overflow,
        "completion_only_loss": completion_only_loss,
        "enable_thinking": enable_thinking,
    }
    try:
        opened = load(model_of(adapters, model), device=device, base_dtype=base_dtype)
        with Bar("loading", opened.tensors_to_load()) as bar:
            options["progress"] = lambda name: bar.advance()
            if several:
                losses = evaluate_several(opened, data, adapters, include_base=compare, **options)
            else:
                name, directory = next(iter(adapters.items()), (BASE, None))
                losses = {name: measure(opened, data, adapter=directory, **options)}
    except NotFiniteError as error:  # a result, of weights that are there
        if as_json:
            print_json({"loss": None, "error": str(error)})
        return _fail(str(error))
    if several:
        if as_json:
            print_json(as_rows(losses, adapters))
        else:
            show_losses(losses)
    else:
        (found,) = losses.values()
        if as_json:
            info = opened.device.info
            device_facts = {"name": info.name, "driver": info.driver, "backend": info.backend}
            print_json(asdict(found) | {"device": device_facts})
        else:
            line("loss", f"{found.loss:.6f}, perplexity {found.perplexity:.4f}")
            line("over", f"{found.tokens:,} trained tokens of {found.rows:,} rows in {found.seconds:.1f} s")
    bad = [name for name, found in losses.items() if not math.isfinite(found.loss)]
    return _fail(f"The loss of {', '.join(bad)} is not finite: its weights are damaged, or too large.") if bad else 0


def _fail(message: str) -> int:
    print(f"wgpu-lora: {printable(message)}", file=sys.stderr)
    return 1
