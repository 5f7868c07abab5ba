"""Options that the commands of 'wgpu-lora bench', and 'profile', share."""

from __future__ import annotations

from typing import Annotated

import typer

from wgpu_lora.cli import completion
from wgpu_lora.cli.options import choice
from wgpu_lora.names.allowed import COMPUTE_DTYPES
from wgpu_lora.weights.registry import BASE_FORMATS, DEFAULT_FORMAT

Model = Annotated[
    str | None,
    typer.Option(help="Model directory, GGUF file, hub id or 'demo', not a shape.", autocompletion=completion.MODEL),
]
Shape = Annotated[
    str | None,
    typer.Option(
        help="A real model's shape with synthetic weights, such as qwen2.5-0.5b.", autocompletion=completion.shapes
    ),
]
Layers = Annotated[int | None, typer.Option(help="Keep only the model's first layers. [x>=1]")]
Tokens = Annotated[int, typer.Option(help="Tokens of a row. [x>=2]")]
Rank = Annotated[int, typer.Option(help="Rank of the adapters. [x>=1]")]
ComputeDtype = Annotated[str, choice("What training's products round activations to.", COMPUTE_DTYPES)]
File = Annotated[str | None, typer.Option("--json", help="File for the results, as JSON lines.", metavar="FILE")]
# The same where a recipe may say otherwise.
TokensOr = Annotated[
    int | None, typer.Option(help="Tokens of a row, of a recipe's at most.", show_default="the recipe's, or 512")
]
RankOr = Annotated[int | None, typer.Option(help="Rank of the adapters. [x>=1]", show_default="the recipe's, or 16")]
BaseDtypeOr = Annotated[
    str | None,
    choice("How the frozen weights are kept.", BASE_FORMATS, show_default=f"the recipe's, or {DEFAULT_FORMAT}"),
]
ComputeDtypeOr = Annotated[
    str | None,
    choice("What products round activations to.", COMPUTE_DTYPES, show_default="the recipe's, or f32"),
]
