"""Write the TypedDicts of options for type checkers and editors, from the dataclasses that declare them.

python -m scripts.typed_options [--check]
"""

from __future__ import annotations

import sys
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from wgpu_lora.infer.generation_options import GenerationOptions
from wgpu_lora.train.option_types import OWN_OPTIONS, kinds
from wgpu_lora.train.options.training_arguments import LISTS, PATHS, TrainingArguments

FILE = Path(__file__).parents[1] / "wgpu_lora" / "names" / "typed_options.py"
HEADER = '''"""Types of keyword arguments, for type checkers and editors. Written by scripts/typed_options.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict
'''
CLASSES = {
    "TrainingOptions": (TrainingArguments, "Of `finetune()`: the command line's options, and paths, lists and rows."),
    "AnswerOptions": (GenerationOptions, "Of `generate()`, `answer()` and `compare()`."),
}  # fmt: skip


def python_type(item: Field[Any]) -> str:
    """The types that Python takes for an option; `from_values` makes those of the field of them."""
    parts = kinds(item)
    further = {
        "Path": item.name in PATHS,
        "int": item.name == "device",
        "Iterable[Mapping[str, Any]]": item.name in ("data", "eval_data"),
        "list[float]": item.name in LISTS and item.name.endswith("_weights"),
        "list[str]": item.name in LISTS and not item.name.endswith("_weights"),
        "Mapping[str, Any]": item.name in OWN_OPTIONS.values(),
    }
    own = [part for part in parts if part != "None"]
    return " | ".join([*own, *(kind for kind, also in further.items() if also), *parts[len(own) :]])


def text() -> str:
    classes = [
        f'\n\nclass {name}(TypedDict, total=False):\n    """{purpose}"""\n\n'
        + "".join(f"    {item.name}: {python_type(item)}\n" for item in fields(kind))
        for name, (kind, purpose) in CLASSES.items()
    ]
    return HEADER + "".join(classes)


if __name__ == "__main__":
    if "--check" not in sys.argv:
        FILE.write_text(text())
    elif FILE.read_text() != text():
        sys.exit(f"{FILE} differs from the options: run 'python -m scripts.typed_options'.")
