"""wgpu-lora bench serve: the speed of a server under load."""

from __future__ import annotations

import json as json_format
from typing import Annotated

import typer

from wgpu_lora.cli.bench import File
from wgpu_lora.cli.console import Bar, console, table
from wgpu_lora.errors import UserError

SHOWN = {
    "max_concurrency": "at once", "request_throughput": "requests/s", "output_throughput": "tokens/s",
    "median_ttft_ms": "TTFT p50", "p95_ttft_ms": "p95", "median_tpot_ms": "TPOT p50", "p95_tpot_ms": "p95",
    "median_itl_ms": "ITL p50", "p95_itl_ms": "p95",
}  # fmt: skip


def serve(
    url: Annotated[str, typer.Option(help="Server of OpenAI's API.")] = "http://127.0.0.1:8000",
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model to ask; if given several times, in turn. By default, the server's first."),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests at each load. [x>=1]")] = 64,
    max_concurrency: Annotated[str, typer.Option(help="Requests at a time, separated by commas.")] = "1,8,32",
    input_len: Annotated[int, typer.Option(help="Words of a prompt. [x>=1]")] = 64,
    output_len: Annotated[int, typer.Option(help="Tokens of an answer. [x>=1]")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    json: File = None,
) -> int:
    """Measure a server under load: throughput, and the time to the first token and between tokens, in milliseconds.

    The figures in --json have the names of 'vllm bench serve'.
    """
    from wgpu_lora.infer.serve.client import ServerClient
    from wgpu_lora.infer.serve.load_test import measure

    loads = [int(text) for text in max_concurrency.split(",") if text.strip().isdecimal()]
    if not loads or min(num_prompts, input_len, output_len, *loads) < 1:
        raise UserError("--num-prompts, --max-concurrency, --input-len and --output-len must be at least 1.")
    clients = [ServerClient(url, name) for name in model or [""]]
    rows = []
    with Bar("measuring", len(loads)) as bar:
        measure(clients, input_len, 2, len(clients), 1, seed + 1)  # what the server compiles on first use
        for load in loads:
            rows.append(measure(clients, input_len, output_len, num_prompts, load, seed))
            bar.advance()
    console().print(table(list(SHOWN.values()), [[f"{row[name]:,.4g}" for name in SHOWN] for row in rows]))
    if json:
        with open(json, "a", encoding="utf-8") as file:
            file.writelines(json_format.dumps(row) + "\n" for row in rows)
    return 0
