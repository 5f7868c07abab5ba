"""wgpu-lora serve: OpenAI's API for a model and its adapters."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wgpu_lora.cli.command import Command
from wgpu_lora.cli.console import Bar, TensorBar, line
from wgpu_lora.cli.parameters import BaseDtype, Device, Model, choice
from wgpu_lora.errors import UserError
from wgpu_lora.files.installation import program
from wgpu_lora.names.spelling import naming, with_renamed_options
from wgpu_lora.weights.base_formats import AUTO

if TYPE_CHECKING:
    from wgpu_lora.events import Events
    from wgpu_lora.models.loaded_model import LoadedModel

MODULES, KEY = "--lora-modules", "WGPU_LORA_API_KEY"


class ServeCommand(Command):
    """--lora-modules may be followed by several NAME=DIR, as vLLM's is."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        result: list[str] = []
        follows = False
        for arg in args:
            follows = arg.replace("_", "-") == MODULES or (follows and not arg.startswith("-"))
            repeated = follows and not arg.startswith("-") and result[-1].replace("_", "-") != MODULES
            result += [MODULES, arg] if repeated else [arg]
        return super().parse_args(ctx, result)


def serve(
    model: Model = None,
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(MODULES, help="Adapters that requests may name as their model.", metavar="[NAME=]DIR ..."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the base model in the API; by default, as in --model.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    unix_socket: Annotated[Path | None, typer.Option(help="Listen on this socket of the file system instead.")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="Key that requests must have; better in the environment.", envvar=KEY),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None, typer.Option(help="Origin of web pages that may use the server; may be given several times.")
    ] = None,
    allow_runtime_lora: Annotated[
        bool, typer.Option("--allow-runtime-lora", help="Let clients load and unload adapters of this machine.")
    ] = False,
    max_loras: Annotated[
        int | None, typer.Option(help="Adapters on the device at a time; by default all of --lora-modules.", min=0)
    ] = None,
    max_lora_rank: Annotated[
        int | None, typer.Option(help="Largest rank of an adapter; by default that of --lora-modules, or 16.", min=1)
    ] = None,
    max_cpu_loras: Annotated[
        int | None, typer.Option(help="Adapters in memory; by default, any number.", min=1)
    ] = None,
    dora: Annotated[bool, typer.Option("--dora", help="Make room for DoRA adapters that are loaded later.")] = False,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Maximum tokens of a prompt with its answer; by default 4096, or the model's limit."),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Answers computed at a time.", min=1)] = 64,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Tokens of prompts in a step; fewer keep others' answers flowing.", min=1)
    ] = 1024,
    cache_tokens: Annotated[
        int | None, typer.Option(help="Tokens of all answers and prompts together; by default as many as fit.")
    ] = None,
    kv_cache_dtype: Annotated[str, choice("Type of keys and values in the cache.", ("f32", "f16"))] = "f32",
    max_queue: Annotated[
        int, typer.Option(help="Answers that may wait; further requests get the status 429.", min=0)
    ] = 256,
    end_seconds: Annotated[
        int, typer.Option(help="Seconds that answers may take to finish once the server is told to end.", min=0)
    ] = 30,
    device: Device = None,
    base_dtype: BaseDtype = AUTO,
) -> int:
    """Serve a model and its adapters over HTTP, with OpenAI's API.

    A request names an adapter as its model; requests of all adapters are computed together. Ctrl-C ends it: answers
    that run are finished first, unless it is pressed again.
    """
    from wgpu_lora.infer.serve import check_libraries

    check_libraries()
    from wgpu_lora.infer.named_adapters import model_of, named_adapters
    from wgpu_lora.infer.serve.http_server import open_engine
    from wgpu_lora.infer.serve.http_server import serve as run
    from wgpu_lora.infer.serve.prompts import Limits

    with naming(with_renamed_options({"adapter": "lora_modules"})):
        adapters = named_adapters(lora_modules or [], aliases=True)
        base_model = model_of(adapters, model)
        if (served_model_name or base_model) in adapters:
            raise UserError(
                f"An adapter has the base model's name, {served_model_name or base_model}: give it another."
            )
        make = partial(
            open_engine, model=base_model, device=device, base_dtype=base_dtype, max_loras=max_loras, dora=dora,
            max_lora_rank=max_lora_rank, max_cpu_loras=max_cpu_loras, max_model_len=max_model_len, show=_loading,
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, cache_tokens=cache_tokens,
            cache_dtype=kv_cache_dtype,
        )  # fmt: skip
        run(
            make, adapters, served_model_name or base_model, host=host, port=port, unix_socket=unix_socket,
            api_key=api_key, origins=tuple(allowed_origins or ()), allow_runtime_lora=allow_runtime_lora,
            limits=Limits(queue=max_queue), end_seconds=end_seconds,
            tell=partial(_describe, [served_model_name or base_model, *adapters], unix_socket, bool(api_key)),
            note=lambda text: line("note", text),
        )  # fmt: skip
    return 0


def _describe(models: Sequence[str], unix_socket: Path | None, has_key: bool, address: str) -> None:
    """Where the server listens, its models, and commands that ask the last of them."""
    print(f"Listening on {address}", flush=True)
    line("models", ", ".join(models))
    body = json.dumps({"model": models[-1], "messages": [{"role": "user", "content": "Hello"}]})
    url = address if unix_socket is None else f"--unix-socket {shlex.quote(address)} http://localhost"
    key = f' -H "Authorization: Bearer ${KEY}"' if has_key else ""
    curl = f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    line("next", curl, whole=True)
    if unix_socket is None:
        line("", f"{program()} chat --url {address} --model {shlex.quote(models[-1])}", whole=True)


@contextmanager
def _loading(model: LoadedModel) -> Iterator[Events]:
    with Bar("loading", model.tensors_to_load()) as bar:
        yield TensorBar(bar)
