"""wgpu-lora recipes: the bundled recipes, and synthetic rows for those that name no data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wgpu_lora.cli.commands import Command, Group
from wgpu_lora.cli.completion import RECIPE
from wgpu_lora.cli.console import console, line
from wgpu_lora.errors import UserError
from wgpu_lora.words import counted

recipes = typer.Typer(
    cls=Group, name="recipes", help="Training set-ups and chains included in the package.", rich_markup_mode=None
)


@recipes.command("list", cls=Command)
def list_recipes() -> int:
    """List the bundled recipes."""
    from rich.table import Table

    from wgpu_lora.assets import asset_dir

    table = Table(box=None, pad_edge=False)
    table.add_column("recipe", no_wrap=True)
    table.add_column("description")
    for path in sorted(Path(str(asset_dir("recipes"))).glob("*.toml")):
        table.add_row(path.stem, path.read_text(encoding="utf-8").splitlines()[0].lstrip("# "))
    console().print(table)
    return 0


@recipes.command("show", cls=Command)
def show(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of a bundled recipe, or a path.", autocompletion=RECIPE)
    ],
) -> int:
    """Print a recipe, with what it reproduces and what it needs."""
    from wgpu_lora.bounded import read_toml
    from wgpu_lora.chain.file import read_chain
    from wgpu_lora.train.options.recipes import find_recipe, recipe_arguments

    path = find_recipe(name)
    if path.exists() and "stage" in read_toml(path, "The recipe"):
        read_chain(name)
    else:
        recipe_arguments(path)
    print(path.read_text(encoding="utf-8"), end="", flush=True)
    return 0


@recipes.command("data", cls=Command)
def data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Recipe with a generator: hive-mind-0.5b.")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="JSONL file to write; it must not exist yet.")],
    rows: Annotated[int, typer.Option(help="Number of rows. [x>=1]")] = 1500,
    seed: Annotated[int, typer.Option(help="Seed of the generator.")] = 0,
) -> int:
    """Write synthetic training rows for a recipe."""
    from wgpu_lora.data.synthetic import GENERATORS, write_rows

    if name not in GENERATORS:
        raise UserError(f"There is no generator for '{name}': choose one of {', '.join(GENERATORS)}.")
    if rows < 1:
        raise UserError(f"--rows must be greater than 0, not {rows}.")
    write_rows(GENERATORS[name], output, rows, seed)
    line("written", f"{counted(rows, 'row')} in {output}")
    return 0
