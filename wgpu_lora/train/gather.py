"""The options of a run: given ones, over those of a recipe or of the run that is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wgpu_lora.train.options.arguments import OUTPUT, TrainingArguments, from_values, named
from wgpu_lora.train.options.recipes import find_recipe, read_recipe, recipe_arguments


def gather(
    given: Mapping[str, Any], recipe: str | None, where: str, demo: bool = True, beside: str | None = None
) -> tuple[TrainingArguments, Path | None]:
    """The given options, over those of a recipe or of a resumed run; also the recipe's path.

    With `demo`, the demo's recipe is used if neither a recipe nor data nor another model is given. `beside` is a
    pipeline's first checkpoint directory, which leads to the pipeline's record if no output is given.
    """
    given = named(given, where)
    if given.get("resume"):
        from wgpu_lora.train.resume import resumed_options  # imports wgpu, which --help does not need

        path = find_recipe(recipe) if recipe else None
        values = {**(named(read_recipe(path), f"The recipe {path}") if path else {}), **given}
        return resumed_options(values, Path(values.get("output") or beside or _last_output()), where), path
    if demo and recipe is None and not given.get("data") and given.get("model") in (None, "demo"):
        recipe = "demo"
    if recipe is None:
        return from_values(given, where), None
    path = find_recipe(recipe)
    return from_values(given, where, recipe_arguments(path)), path


def _last_output() -> str:
    """The directory to resume if none is given: the demo's if it exists, else the default output."""
    demo = read_recipe(find_recipe("demo"))["output"]
    return demo if Path(demo).exists() else OUTPUT
