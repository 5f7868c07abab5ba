"""Recipes: TOML files with options of training, by path or bundled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wgpu_lora.assets import asset_dir
from wgpu_lora.bounded import read_toml
from wgpu_lora.errors import UserError
from wgpu_lora.names.naming import IN_FILE
from wgpu_lora.train.options.arguments import TrainingArguments, from_values


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
