"""Save the base model's tokenizer files with an adapter, byte for byte, so that other libraries can load it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import write_bytes_atomic
from wgpu_lora.files.json_files import parse_object
from wgpu_lora.files.paths import links_outside
from wgpu_lora.formats.file_digests import TEMPLATE, TOKENIZER
from wgpu_lora.formats.tokenizer.tokenizer import Tokenizer
from wgpu_lora.formats.tokenizer.tokenizer_settings import read_settings

WHOLE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
MAX_BYTES = 256 << 20  # of all files; the largest vocabularies take 40 MB
OF_OTHERS = "generation_config.json"  # belongs to a model, not to an adapter
OWN_TOKENIZER = "{} has its own tokenizer or chat template, which is used instead of the model's"


def adapter_tokenizer(base: Tokenizer, vocab_size: int, adapter: str | Path) -> Tokenizer:
    """The tokenizer of an adapter for a model with `vocab_size` tokens and the tokenizer `base`; `base` if it is that.

    Raises:
        UserError: a file beside the adapter is invalid, or it has tokens that the model lacks.
    """
    result = base.for_adapter(Path(adapter))
    if result is not base and result.vocab_size > max(vocab_size, base.vocab_size):
        raise UserError(
            f"The tokenizer in {adapter} has {result.vocab_size:,} tokens, but the model has {vocab_size:,}: adapters "
            "with new tokens are not supported; use the model that it was trained on."
        )
    return result


def write_tokenizer(directory: Path, files: Mapping[str, bytes]) -> bool:
    """Write the files of a model's tokenizer and chat template to an adapter's directory; returns whether it has them.

    If there is no such directory, or it has one of the files with other contents, nothing is written.

    Raises:
        OSError: the files cannot be written.
    """
    if not directory.is_dir():
        return False
    for name, data in files.items():
        path = directory / name
        if path.is_symlink() or (path.exists() and not (path.is_file() and path.read_bytes() == data)):
            return False
    for name, data in files.items():
        if not (directory / name).exists():
            (directory / name).parent.mkdir(exist_ok=True)
            write_bytes_atomic(directory / name, data)
    return True


def copy_tokenizer(adapter: Path, directory: Path) -> None:
    """Replace a written model's tokenizer and chat template by those beside an adapter, as far as these are there."""
    files = _files_of(adapter)
    kinds = [TOKENIZER] if WHOLE in files else []
    if read_settings(adapter)["chat_templates"]:
        kinds.append(TEMPLATE)
    for path in [*directory.iterdir(), *(directory / "additional_chat_templates").glob("*.jinja")]:
        if any(kind.fullmatch(path.relative_to(directory).as_posix()) for kind in kinds):
            path.unlink()
    for name, data in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(data)


def tokenizer_files(model: Path, tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """The files of a model's tokenizer and chat template by name; none without a tokenizer.

    They are the base's or, if these have changed since loading, made from the loaded tokenizer. Links that lead out of
    the model's directory are not followed. For a GGUF file, they are those of the converted tokenizer.
    """
    if tokenizer is None:
        return {}
    try:
        files = _files_of(model) if model.is_dir() else {}
    except OSError:  # removed or locked since loading
        files = {}
    if hashlib.sha256(files.get(WHOLE, b"")).hexdigest() != tokenizer.digest:
        result = tokenizer.files()
        result.pop(OF_OTHERS, None)
        return {name: text.encode() for name, text in result.items()}
    if not _names_its_class(files.get(SETTINGS)):  # else transformers looks it up in the model's config.json
        settings = json.loads(files[SETTINGS]) if SETTINGS in files else {}
        result = json.loads(tokenizer.files()[SETTINGS])
        files[SETTINGS] = (json.dumps({**result, **settings}, indent=2, ensure_ascii=False) + "\n").encode()
    return files


def _files_of(model: Path) -> dict[str, bytes]:
    result, total = {}, 0
    for path in sorted([*model.iterdir(), *(model / "additional_chat_templates").glob("*.jinja")]):
        name = path.relative_to(model).as_posix()
        match = TOKENIZER.fullmatch(name) or TEMPLATE.fullmatch(name)
        if match and path.is_file() and not links_outside(path, model):
            total += path.stat().st_size
            if total > MAX_BYTES:
                return {}
            result[name] = path.read_bytes()
    return result


def _names_its_class(data: bytes | None) -> bool:
    try:
        return data is not None and isinstance(parse_object(data, SETTINGS).get("tokenizer_class"), str)
    except UserError:
        return True  # damaged since loading: leave it as it is
