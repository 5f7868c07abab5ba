"""wgpu-lora generate: a prompt in, the model's words out as they come."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from wgpu_lora.cli.console import Bar, print_json
from wgpu_lora.cli.options import Adapter, BaseDtype, Device, Json, Model
from wgpu_lora.errors import UserError


def generate(
    prompt: Annotated[str | None, typer.Option(help="What to ask; read from stdin where that is piped.")] = None,
    system: Annotated[str | None, typer.Option(help="System message of the chat template.")] = None,
    model: Model = None,
    adapter: Adapter = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of the answer at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; higher is more varied.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Only the likeliest tokens up to this sum; 1 keeps all.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Only this many of the likeliest tokens; 0 keeps all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    device: Device = None,
    base_dtype: BaseDtype = "nf4",
    as_json: Json = False,
) -> int:
    """Answer a prompt, with or without an adapter."""
    if prompt is None:
        prompt = _piped()
    if not prompt:
        raise UserError("The prompt is empty: say what to ask.")
    from wgpu_lora.api import answer, base_of, load
    from wgpu_lora.infer.prompt import check_text

    check_text("prompt", prompt)  # before anything is opened
    base = base_of(adapter) if adapter else None
    opened = load(model or base or "demo", device=device, base_dtype=base_dtype)
    with Bar("loading", len(opened.checkpoint.names())) as bar:

        def show(text: str) -> None:
            bar.close()
            print(text, end="", flush=True)

        (found,) = answer(
            opened,
            [prompt],
            adapter=adapter,
            system=system,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            on_text=None if as_json else show,
            progress=lambda name: bar.advance(),
        )
    if as_json:
        print_json(found.as_dict())
    else:
        print(flush=True)
    return 0


def _piped() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise UserError("--prompt is missing: say what to ask, or pipe it in.")
    try:
        return sys.stdin.read().strip()
    except UnicodeDecodeError:
        raise UserError("The prompt is not valid UTF-8: write its characters out, or save it as UTF-8.") from None
