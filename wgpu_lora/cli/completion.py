"""Shell completion of option values: choices, names included in the package, and the default of a number."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from glob import escape, glob
from pathlib import Path
from typing import Any

from wgpu_lora.assets import asset_dir

Completer = Callable[[str], list[Any]]  # the incomplete word -> values, or (value, help)


def dashed(words: str) -> str:
    """A command line to complete, with dashes in its options where underscores were typed."""
    return re.sub(r"(?<!\S)--[\w-]+", lambda option: option[0].replace("_", "-"), words)


def one_of(values: Iterable[str]) -> Completer:
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def number(default: Any, within: object) -> Completer:
    """The default of a number, with its range as the help that some shells show."""
    return lambda incomplete: [] if default is None else [(str(default), str(within or "the default"))]


def or_files(values: Callable[[], Sequence[str]]) -> Completer:
    """Names, and files beside them; if there are only files, the shell completes them, which it does better."""

    def complete(incomplete: str) -> list[Any]:
        found = [value for value in values() if value.startswith(incomplete)]
        if not found:
            return []
        files = sorted(glob(f"{escape(incomplete)}*"))
        return [*found, *(f"{path}/" if Path(path).is_dir() else path for path in files)]

    return complete


def bundled(directory: str) -> list[str]:
    """The names of the TOML files in a directory of the package."""
    return sorted(path.stem for path in Path(str(asset_dir(directory))).glob("*.toml"))


def modules(incomplete: str) -> list[str]:
    """'all-linear', or names of linear layers separated by commas."""
    before, comma, last = incomplete.rpartition(",")
    from wgpu_lora.models.architectures import module_names

    left = [name for name in module_names() if name not in before.split(",") and name.startswith(last)]
    whole = [] if comma else one_of(["all-linear"])(incomplete)
    return [*whole, *(f"{before}{comma}{name}" for name in left)]


def bricks(incomplete: str) -> list[str]:
    return one_of(bundled("bricks"))(incomplete)


def shapes(incomplete: str) -> list[str]:
    from wgpu_lora.models.shapes import SHAPES

    return [name for name in SHAPES if name.startswith(incomplete)]


MODEL = or_files(lambda: ["demo"])
RECIPE = or_files(lambda: bundled("recipes"))
# For training options whose values are neither choices nor numbers.
BY_NAME: dict[str, Completer] = {
    "model": MODEL,
    "target_modules": modules,
    "memory_budget": one_of(["2GiB", "4GiB", "8GiB", "12GiB", "16GiB", "24GiB"]),
}
