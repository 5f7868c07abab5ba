"""Recipes: TOML files with options of training, by path or bundled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.files.assets import asset_dir
from wgpu_lora.files.json_files import read_toml
from wgpu_lora.names.spelling import IN_FILE
from wgpu_lora.train.options.training_arguments import OUTPUT, TrainingArguments, from_values, named


def recipe_arguments(path: Path) -> TrainingArguments:
    """The options of a recipe file, over the defaults."""
    return from_values(read_recipe(path), f"The recipe {path}", names=IN_FILE)


def find_recipe(name: str) -> Path:
    """A recipe file by path, or a bundled one by name, which is also that of the directory of its results."""
    bundled = asset_dir("recipes") / f"{name}.toml"
    return bundled if bundled.is_file() and not Path(name).is_file() else Path(name)


def read_recipe(path: Path) -> dict[str, Any]:
    """A flat TOML file of option names and values."""
    if not path.exists():
        names = ", ".join(sorted(p.stem for p in asset_dir("recipes").glob("*.toml")))
        raise UserError(f"The recipe {path} does not exist: give a TOML file, or the name of a bundled one ({names}).")
    values = read_toml(path, "The recipe")
    if isinstance(values.get("stage"), list):
        name = path.stem if path.parent == asset_dir("recipes") else path
        raise UserError(f"{path} is a chain of stages, not a recipe: run it with 'wgpu-lora run {name}'.")
    nested = [key for key, value in values.items() if isinstance(value, dict)]
    if nested:
        raise UserError(f"The recipe {path} has a table [{nested[0]}]: recipes are flat, one option per line.")
    return values


def resolve_options(
    options: Mapping[str, Any], recipe: str | None, where: str, demo: bool = True, checkpoint: str | None = None
) -> tuple[TrainingArguments, Path | None]:
    """The options, over those of a recipe or of a resumed run; also the recipe's path.

    With `demo`, the demo's recipe is used if there is neither a recipe nor data nor another model. `checkpoint` is a
    pipeline's first checkpoint directory, which leads to the pipeline's record if there is no output.
    """
    options = named(options, where)
    if options.get("resume"):
        from wgpu_lora.train.run.resume import resumed_options  # imports wgpu, which --help does not need

        path = find_recipe(recipe) if recipe else None
        values = {**(named(read_recipe(path), f"The recipe {path}") if path else {}), **options}
        return resumed_options(values, Path(values.get("output") or checkpoint or _last_output()), where), path
    if demo and recipe is None and not options.get("data") and options.get("model") in (None, "demo"):
        recipe = "demo"
    if recipe is None:
        return from_values(options, where), None
    path = find_recipe(recipe)
    return from_values(options, where, recipe_arguments(path)), path


def _last_output() -> str:
    """The directory to resume if none is given: the demo's if it exists, else the default output."""
    demo = read_recipe(find_recipe("demo"))["output"]
    return demo if Path(demo).exists() else OUTPUT
