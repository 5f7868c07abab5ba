"""Options shared by the commands of 'wgpu-lora bench' and 'profile'."""

from __future__ import annotations

from typing import Annotated

import typer

from wgpu_lora.cli import parameters
from wgpu_lora.cli.parameters import choice
from wgpu_lora.names.choices import COMPUTE_DTYPES
from wgpu_lora.weights.base_formats import BASE_FORMATS, DEFAULT_FORMAT

Model = Annotated[
    str | None,
    typer.Option(
        help="Model directory, GGUF file, hub id, 'smollm2' or 'demo', not a shape.", autocompletion=parameters.MODEL
    ),
]
Shape = Annotated[
    str | None,
    typer.Option(
        help="Shape of a real model with synthetic weights, such as qwen2.5-0.5b.", autocompletion=parameters.shapes
    ),
]
Layers = Annotated[int | None, typer.Option(help="Use only this many layers, the model's first. [x>=1]")]
Tokens = Annotated[int, typer.Option(help="Tokens per row. [x>=2]")]
Rank = Annotated[int, typer.Option(help="LoRA rank. [x>=1]")]
ComputeDtype = Annotated[str, choice("Type that the inputs of frozen matmuls are rounded to.", COMPUTE_DTYPES)]
File = Annotated[str | None, typer.Option("--json", help="File for the results, as JSON lines.", metavar="FILE")]
# The same options for commands with a recipe.
TokensOr = Annotated[
    int | None, typer.Option(help="Tokens per row; with a recipe, the maximum.", show_default="the recipe's, or 512")
]
RankOr = Annotated[int | None, typer.Option(help="LoRA rank. [x>=1]", show_default="the recipe's, or 16")]
BaseDtypeOr = Annotated[
    str | None,
    choice(
        "Storage type of the frozen base weights; low-bit ones also by group and mixed, such as lut2-g16 and q2a4.",
        BASE_FORMATS,
        show_default=f"the recipe's, or {DEFAULT_FORMAT}",
    ),
]
ComputeDtypeOr = Annotated[
    str | None,
    choice(
        "Type that the inputs of frozen matmuls are rounded to.", COMPUTE_DTYPES, show_default="the recipe's, or f32"
    ),
]
