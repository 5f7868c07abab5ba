"""Model cards: their common parts, and the cards of merged models and uploads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from wgpu_lora.files.atomic import file_digest
from wgpu_lora.files.paths import links_outside
from wgpu_lora.formats.gguf.gguf_header import read_header
from wgpu_lora.formats.hub import hub_id, is_gguf
from wgpu_lora.formats.peft_adapter import WEIGHTS

CARD = "README.md"
MAX_CARD = 1 << 18  # characters
_LICENSE = re.compile(r"""^license:\s*["']?([\w.+-]+)""", re.MULTILINE)
_HEADER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)


def license_of(model: Path) -> str | None:
    """The licence that a model's card or GGUF file names; None if it does not."""
    if is_gguf(model):
        name = read_header(model).values.get("general.license")
        return name if isinstance(name, str) else None
    header = _HEADER.match(_card_text(model))
    result = _LICENSE.search(header[0]) if header else None
    return result[1] if result else None


def card_of_files(name: str, kind: str, files: Mapping[str, Path]) -> str:
    """A card that lists files and their SHA-256. kind: adapter, model or GGUF."""
    library = {"adapter": "peft", "model": "transformers"}.get(kind)
    tags = ["wgpu-lora", *(["gguf"] if kind == "GGUF" else [])]
    rows = {f"{path}, SHA-256": file_digest(file) for path, file in files.items()}
    return f"{header(None, library, tags)}\n# {name}\n\n{table(rows)}\n"


def card_of_merged(model: str, adapter: Path, dtype: str) -> str:
    """A merged model's card: its base and adapter, followed by the training part of the adapter's card."""
    base = hub_id(model)
    rows = {
        "base": base or Path(model).name,
        "adapter": adapter.resolve().name,
        f"{WEIGHTS}, SHA-256": file_digest(adapter / WEIGHTS),
        "weights": dtype,
    }
    training = _HEADER.sub("", _card_text(adapter))
    title = f"# {rows['base']}, an adapter merged in"
    return f"{header(base, 'transformers', ['wgpu-lora'])}\n{title}\n\n{table(rows)}\n{training}"


def card_of_repository(title: str, model: str, adapters: Sequence[Path], files: Sequence[Path]) -> str:
    """The card of a repository of adapters, each in a folder, and GGUF files: digests, then the adapters' cards."""
    base = hub_id(model)
    rows: dict[str, object] = {"base": base or Path(model).name}
    rows |= {f"{path.name}/, SHA-256 of {WEIGHTS}": file_digest(path / WEIGHTS) for path in adapters}
    rows |= {f"{path.name}, SHA-256": file_digest(path) for path in files}
    tags = ["lora", "wgpu-lora", *(["gguf"] if files else [])]
    parts = [f"{header(base, 'peft', tags)}\n# {title}\n\n{table(rows)}\n"]
    for path in adapters:
        text = _HEADER.sub("", _card_text(path)).strip()
        lowered = re.sub(r"^(#+ )", r"#\1", text, flags=re.MULTILINE)
        parts.append(f"## {path.name}/\n\n{lowered}\n")
    return "\n".join(parts)


def _card_text(directory: Path) -> str:
    """The card of an adapter or a model. Empty if there is none, if it is PEFT's unfilled form, or a link."""
    path = directory / CARD
    if not path.is_file() or links_outside(path, directory):
        return ""
    with path.open(encoding="utf-8", errors="replace") as file:
        text = file.read(MAX_CARD)
    return "" if "[More Information Needed]" in text else text


def table(rows: Mapping[str, object]) -> str:
    """A Markdown table of names and values."""
    lines = (f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items())
    return "\n".join(["| | |", "|---|---|", *lines])


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "&#124;")


def header(base: str | None, library: str | None, tags: list[str]) -> str:
    """The YAML header for the hub. base: a hub id."""
    from huggingface_hub import ModelCardData

    data = ModelCardData(base_model=base, library_name=library, pipeline_tag="text-generation", tags=tags)
    return f"---\n{data.to_yaml()}\n---\n"
