"""The tokenizer's files beside an adapter, so that others can load it alone: those of the base, byte for byte."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from wgpu_lora.atomic import write_bytes_atomic
from wgpu_lora.bounded import leads_out, parse_object
from wgpu_lora.data import Tokenizer
from wgpu_lora.errors import UserError
from wgpu_lora.formats.file_names import TEMPLATE, TOKENIZER

WHOLE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
MAX_BYTES = 256 << 20  # of all of them; the largest vocabularies take 40 MB
OF_OTHERS = "generation_config.json"  # which a model has, and an adapter does not


def write_tokenizer(directory: Path, model: Path, tokenizer: Tokenizer | None) -> None:
    """Writes the tokenizer and the chat template of a model into an adapter's directory, where that is there.

    A directory that has other files under one of the names keeps all of its own. Links that lead out of the model's
    directory are not followed. Of a GGUF file, what was made of it is written.

    Raises:
        OSError: the disk refuses.
    """
    if tokenizer is None or not directory.is_dir():
        return
    files = tokenizer_files(model, tokenizer)
    for name, data in files.items():
        path = directory / name
        if path.is_symlink() or (path.exists() and not (path.is_file() and path.read_bytes() == data)):
            return
    for name, data in files.items():
        if not (directory / name).exists():
            (directory / name).parent.mkdir(exist_ok=True)
            write_bytes_atomic(directory / name, data)


def tokenizer_files(model: Path, tokenizer: Tokenizer) -> dict[str, bytes]:
    """By name in the directory: the base's own files or, where those changed since they were read, what was read."""
    try:
        files = _files_of(model) if model.is_dir() else {}
    except OSError:  # gone or locked since
        files = {}
    if hashlib.sha256(files.get(WHOLE, b"")).hexdigest() != tokenizer.digest:
        made = tokenizer.files()
        made.pop(OF_OTHERS, None)
        return {name: text.encode() for name, text in made.items()}
    if not _names_its_class(files.get(SETTINGS)):  # which transformers asks the model's config.json for, else
        stated = json.loads(files[SETTINGS]) if SETTINGS in files else {}
        made = json.loads(tokenizer.files()[SETTINGS])
        files[SETTINGS] = (json.dumps({**made, **stated}, indent=2, ensure_ascii=False) + "\n").encode()
    return files


def _files_of(model: Path) -> dict[str, bytes]:
    found, total = {}, 0
    for path in sorted([*model.iterdir(), *(model / "additional_chat_templates").glob("*.jinja")]):
        name = path.relative_to(model).as_posix()
        known = TOKENIZER.fullmatch(name) or TEMPLATE.fullmatch(name)
        if known and path.is_file() and not leads_out(path, model):
            total += path.stat().st_size
            if total > MAX_BYTES:
                return {}
            found[name] = path.read_bytes()
    return found


def _names_its_class(data: bytes | None) -> bool:
    try:
        return data is not None and isinstance(parse_object(data, SETTINGS).get("tokenizer_class"), str)
    except UserError:
        return True  # damaged since it was read: left as it is
