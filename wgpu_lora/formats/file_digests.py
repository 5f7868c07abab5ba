"""Digests in the metadata of safetensors files that we wrote: of the whole file, and of the files beside it."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import sha256
from wgpu_lora.files.json_files import read_bytes

# In the metadata: of the whole file, with NO_DIGEST in its place; and, as JSON, of the files beside it by name. Each of
# the two keys shows a damage of the other. OF_VALUES, of all bytes behind the header, is what earlier versions wrote.
DIGEST, COMPANIONS, OF_VALUES = "wgpu_lora_digest", "wgpu_lora_companions", "wgpu_lora_sha256"
NO_DIGEST = "0" * 64
ADAPTER_CONFIG = "adapter_config.json"
TOKENIZER = re.compile(
    r"tokenizer(_config)?\.json|tokenizer\.model|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)"
    r"|merges\.txt|spiece\.model|sentencepiece\.bpe\.model"
)
TEMPLATE = re.compile(r"chat_template\.(jinja|json)|additional_chat_templates/[\w-]+\.jinja")
COMPANION = re.compile(
    rf"{TOKENIZER.pattern}|{TEMPLATE.pattern}|config\.json|adapter_config\.json|model\.safetensors\.index\.json"
)
EMPTY: Mapping[str, bytes] = {}
CHUNK = 1 << 20


def companion_digest(name: str, data: bytes) -> str:
    """The digest of a file beside the weights. The base's name in an adapter's config may be changed, as for a hub."""
    if name == ADAPTER_CONFIG:
        try:
            config = json.loads(data)
            config.pop("base_model_name_or_path", None)
            data = json.dumps(config, sort_keys=True).encode()
        except (ValueError, AttributeError, RecursionError):
            pass  # not as we wrote it
    return sha256(data)


def companion_digests(files: Mapping[str, bytes]) -> dict[str, str]:
    """The digests of those files that are read beside weights: configuration, tokenizer and template."""
    return {name: companion_digest(name, files[name]) for name in sorted(files) if COMPANION.fullmatch(name)}


def files_in(directory: Path) -> dict[str, bytes]:
    """The files of a directory of weights that `companion_digests` covers."""
    names = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return {name: read_bytes(directory / name) for name in names if COMPANION.fullmatch(name)}


def digest_metadata(companions: Mapping[str, str]) -> dict[str, str]:
    """The metadata of a file whose digest follows, by replacing the first NO_DIGEST in it."""
    return {"format": "pt", DIGEST: NO_DIGEST, COMPANIONS: json.dumps(companions)}  # transformers requires the format


def with_digests(data: bytes, companions: Mapping[str, bytes]) -> bytes:
    """A safetensors file, in memory, with the digests in its metadata."""
    length = int.from_bytes(data[:8], "little")
    header = {"__metadata__": digest_metadata(companion_digests(companions))}
    header |= {name: entry for name, entry in json.loads(data[8 : 8 + length]).items() if name != "__metadata__"}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the data
    whole = len(text).to_bytes(8, "little") + text + data[8 + length :]
    return whole.replace(NO_DIGEST.encode(), sha256(whole).encode(), 1)


def check_digests(path: Path, contents: Mapping[str, bytes] | None = None) -> None:
    """Compares a file, whose header has been read, and those beside it with the digests that the writer left, if any.

    contents: of the files by name, if they are in memory.

    Raises:
        UserError: they differ.
    """
    with path.open("rb") if contents is None else io.BytesIO(contents[path.name]) as file:
        prefix = file.read(8)
        text = file.read(int.from_bytes(prefix, "little"))
        metadata = json.loads(text).get("__metadata__")
        metadata = metadata if isinstance(metadata, dict) else {}
        digest, companions, values = (metadata.get(key) for key in (DIGEST, COMPANIONS, OF_VALUES))
        if digest is not None or companions is not None:
            begin = prefix + text.replace(str(digest).encode(), NO_DIGEST.encode(), 1)
            intact = _digest(file, begin) == digest and companions is not None
        else:
            intact = values is None or _digest(file) == values
    if not intact:
        raise UserError(f"{path} is damaged, since its values are not those that were written: copy it again.")
    for name, expected in _parsed(companions).items():
        other = path.parent / name
        data = contents.get(name) if contents is not None else read_bytes(other) if other.exists() else None
        if data is not None and companion_digest(name, data) != expected:
            raise UserError(
                f"{other} is not the file that was written with {path.name}: restore it or, if you changed it, save "
                "these weights again, as save_pretrained does."
            )


def _digest(file: IO[bytes], begin: bytes = b"") -> str:
    result = hashlib.sha256(begin)
    while chunk := file.read(CHUNK):
        result.update(chunk)
    return result.hexdigest()


def _parsed(companions: object) -> dict[str, str]:
    """The digests by name; none for what nobody wrote so."""
    try:
        result = json.loads(companions) if isinstance(companions, str) else {}
    except (ValueError, RecursionError):
        return {}
    result = result if isinstance(result, dict) else {}
    return {name: digest for name, digest in result.items() if COMPANION.fullmatch(name)}
