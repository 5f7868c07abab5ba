"""Model cards: the parts that they share, and the cards of what is made from files alone (a run's: train/card.py)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from wgpu_lora.formats.atomic import file_digest
from wgpu_lora.formats.hub import hub_id
from wgpu_lora.formats.peft import WEIGHTS

CARD = "README.md"
_HEADER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)


def card_of_files(name: str, kind: str, files: Mapping[str, Path]) -> str:
    """A card that states files and their SHA-256; `kind`: adapter, model or GGUF."""
    library = {"adapter": "peft", "model": "transformers"}.get(kind)
    tags = ["wgpu-lora", *(["gguf"] if kind == "GGUF" else [])]
    rows = {f"{path}, SHA-256": file_digest(place) for path, place in files.items()}
    return f"{header(None, library, tags)}\n# {name}\n\n{table(rows)}\n"


def card_of_merged(model: str, adapter: Path, dtype: str) -> str:
    """A merged model's card: what it was made of, and then what the adapter's own card says of its training."""
    base = hub_id(model)
    rows = {
        "base": base or Path(model).name,
        "adapter": adapter.resolve().name,
        f"{WEIGHTS}, SHA-256": file_digest(adapter / WEIGHTS),
        "weights": dtype,
    }
    own = adapter / CARD
    training = _HEADER.sub("", own.read_text(encoding="utf-8", errors="replace")) if own.is_file() else ""
    title = f"# {rows['base']}, an adapter merged in"
    return f"{header(base, 'transformers', ['wgpu-lora'])}\n{title}\n\n{table(rows)}\n{training}"


def table(rows: Mapping[str, object]) -> str:
    """A Markdown table of names and values."""
    lines = (f"| {name} | {' '.join(str(value).split()).replace('|', '&#124;')} |" for name, value in rows.items())
    return "\n".join(["| | |", "|---|---|", *lines])


def header(base: str | None, library: str | None, tags: list[str]) -> str:
    """The YAML that the hub reads; `base`: a hub id."""
    from huggingface_hub import ModelCardData

    data = ModelCardData(base_model=base, library_name=library, pipeline_tag="text-generation", tags=tags)
    return f"---\n{data.to_yaml()}\n---\n"
