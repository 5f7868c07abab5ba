"""The settings in files beside a tokenizer.json: special tokens, chat templates, and ids that end a generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wgpu_lora.bounded import read_json
from wgpu_lora.errors import UserError

MAX_TEMPLATE = 1 << 20


def read_settings(directory: Path) -> dict[str, Any]:
    """Keyword arguments for `Tokenizer`. Raises UserError if a file cannot be read or is invalid."""
    config = _read_object(directory / "tokenizer_config.json")
    return {
        "special_tokens": _special_tokens(config, _read_object(directory / "special_tokens_map.json")),
        "chat_templates": _chat_templates(directory, config),
        "eos_ids": _generation_eos(directory / "generation_config.json"),
    }


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if there is no such file."""
    return read_json(path) if path.exists() else {}


def _special_tokens(config: dict[str, Any], token_map: dict[str, Any]) -> dict[str, str]:
    # special_tokens_map.json takes precedence in old checkpoints, which lack `added_tokens_decoder`.
    newer_wins = {**token_map, **config} if "added_tokens_decoder" in config else {**config, **token_map}
    tokens = {}
    for name, value in newer_wins.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _chat_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    files = {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if (directory / "chat_template.jinja").exists():
        files["default"] = directory / "chat_template.jinja"
    try:
        if files:
            return {name: _template(path) for name, path in files.items()}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"A chat template in {directory} cannot be read ({error}); download it again.") from error
    source = config.get("chat_template")
    if isinstance(source, list):
        try:
            return {str(entry["name"]): str(entry["template"]) for entry in source}
        except (TypeError, KeyError) as error:
            where = directory / "tokenizer_config.json"
            raise UserError(f"{where}: every entry of 'chat_template' needs a 'name' and a 'template'.") from error
    return {"default": source} if isinstance(source, str) else {}


def _template(path: Path) -> str:
    if not path.is_file() or path.stat().st_size > MAX_TEMPLATE:
        raise UserError(f"{path} is not a regular file of at most {MAX_TEMPLATE:,} bytes; download it again.")
    return path.read_text(encoding="utf-8")


def _generation_eos(path: Path) -> list[int]:
    value = _read_object(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(id, int) and not isinstance(id, bool) for id in ids):
        raise UserError(f"{path}: 'eos_token_id' is {value!r}, but must be a token id or a list of them.")
    return ids
