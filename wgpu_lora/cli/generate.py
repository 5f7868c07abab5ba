"""wgpu-lora generate: a prompt in, the model's words out as they come."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from wgpu_lora.bounded import printable
from wgpu_lora.cli.console import Bar, is_terminal, print_json
from wgpu_lora.cli.options import Adapter, BaseDtype, Device, Json, Model, refuse_idle
from wgpu_lora.cli.several import as_rows, show_answers
from wgpu_lora.errors import UserError

DRAWING = ("top_p", "top_k")  # a --seed is often given whether it is needed or not


def generate(
    ctx: typer.Context,
    prompt: Annotated[str | None, typer.Option(help="What to ask; read from stdin where that is piped.")] = None,
    system: Annotated[str | None, typer.Option(help="System message of the chat template.")] = None,
    enable_thinking: Annotated[
        bool | None, typer.Option(help="Passed to the chat template; what the adapter was trained with.")
    ] = None,
    model: Model = None,
    adapter: Adapter = None,
    compare: Annotated[bool, typer.Option("--compare", help="Show the base's answer beside every adapter's.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of the answer at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; higher is more varied.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Only the likeliest tokens up to this sum; 1 keeps all.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Only this many of the likeliest tokens; 0 keeps all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    device: Device = None,
    base_dtype: BaseDtype = "nf4",
    as_json: Json = False,
) -> int:
    """Answer a prompt, with or without an adapter.

    Several adapters all answer, in a single batch.
    """
    if temperature == 0:
        refuse_idle(ctx, DRAWING, "at --temperature 0, which takes the likeliest token")
    if prompt is None:
        prompt = _piped()
    if not prompt:
        raise UserError("The prompt is empty: say what to ask.")
    from wgpu_lora.api import answer, load
    from wgpu_lora.api import compare as answer_each
    from wgpu_lora.infer.named import model_of, named_adapters, slots_of
    from wgpu_lora.infer.prompt import check_text

    check_text("prompt", prompt)  # before anything is opened
    adapters = named_adapters(adapter or [])
    several = compare or len(adapters) > 1
    slots = slots_of(adapters, compare) if several else {}
    opened = load(model_of(adapters, model), device=device, base_dtype=base_dtype)
    options: dict[str, Any] = {
        "system": system,
        "enable_thinking": enable_thinking,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
    }
    with Bar("loading", opened.tensors_to_load()) as bar:
        options["progress"] = lambda name: bar.advance()
        if several:

            def count(tokens: int) -> None:
                bar.advance("answering", to=tokens, total=len(slots) * max_new_tokens)

            answers = answer_each(opened, prompt, adapters, include_base=compare, on_done=count, **options)
        else:

            def show(text: str) -> None:
                bar.close()
                # What a model writes may be meant for the terminal; a pipe gets it as it is.
                print(printable(text, "\n\t") if is_terminal(sys.stdout) else text, end="", flush=True)

            only = next(iter(adapters.values()), None)
            (found,) = answer(opened, [prompt], adapter=only, on_text=None if as_json else show, **options)
    if several:
        if as_json:
            print_json(as_rows(answers, adapters))
        else:
            show_answers(answers)
    elif as_json:
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
