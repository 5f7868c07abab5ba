"""The settings in files beside a tokenizer.json: special and added tokens, chat templates, ids of end tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.files.json_files import read_json

MAX_TEMPLATE = 1 << 20
ATTRIBUTES = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token


def read_settings(directory: Path) -> dict[str, Any]:
    """Keyword arguments for `Tokenizer`. Raises UserError if a file cannot be read or is invalid."""
    config = _read_object(directory / "tokenizer_config.json")
    return {
        "special_tokens": {name: token["content"] for name, token in _special_tokens(directory, config).items()},
        "chat_templates": _chat_templates(directory, config),
        "eos_ids": _generation_eos(directory / "generation_config.json"),
        "template_origin": f" in {_template_file(directory, config)}",
    }


def read_added_tokens(directory: Path) -> list[dict[str, Any]]:
    """Added tokens that the files beside a tokenizer.json name, in the order in which transformers 5 adds them.

    An entry has `content` and, if the files have them, `id` and the attributes of an added token. They come from
    `added_tokens_decoder` of tokenizer_config.json or, in old checkpoints, from added_tokens.json, then from named
    special tokens (`eos_token`) and lists of further ones.

    Raises:
        UserError: a file cannot be read or is invalid.
    """
    config = _read_object(directory / "tokenizer_config.json")
    special_tokens = [*_special_tokens(directory, config).values()]
    newer = config.get("added_tokens_decoder") is not None
    maps = [config] if newer else [config, _read_object(directory / "special_tokens_map.json")]
    older = {} if newer else _read_object(directory / "added_tokens.json")
    try:
        for settings in maps:
            for extra in (settings.get("extra_special_tokens") or [], settings.get("additional_special_tokens") or []):
                special_tokens += [_token(token) for token in (extra.values() if isinstance(extra, dict) else extra)]
        special = {token["content"] for token in special_tokens}
        decoder = {id: {"content": text, "special": text in special} for text, id in older.items()}
        decoder = config["added_tokens_decoder"] if newer else decoder
        added_tokens = [{**_token(token), "id": int(id)} for id, token in decoder.items()]
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"The tokenizer's settings in {directory} have an added token without a text or a whole id, or with an "
            "attribute that is not true or false; download them again."
        ) from error
    added_tokens.sort(key=lambda token: token["id"])
    return [
        *added_tokens,
        *(token for token in special_tokens if token["content"] not in {entry["content"] for entry in added_tokens}),
    ]


def _token(value: Any) -> dict[str, Any]:
    """An added token, given by its text or as an object. Raises TypeError."""
    token = {"content": value, "special": True} if isinstance(value, str) else value
    if not isinstance(token, dict) or not isinstance(token.get("content"), str):
        raise TypeError
    if not all(isinstance(token.get(name, False), bool) for name in ATTRIBUTES):
        raise TypeError
    return {name: item for name, item in token.items() if name in ("content", *ATTRIBUTES)}


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if there is no such file."""
    return read_json(path) if path.exists() else {}


def _special_tokens(directory: Path, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Named special tokens, such as `eos_token`."""
    token_map = _read_object(directory / "special_tokens_map.json")
    # special_tokens_map.json takes precedence in old checkpoints, which lack `added_tokens_decoder`.
    newer_wins = {**token_map, **config} if config.get("added_tokens_decoder") is not None else {**config, **token_map}
    tokens = {}
    for name, value in newer_wins.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            try:
                tokens[name] = {**_token(value), "special": True}
            except TypeError as error:
                raise UserError(
                    f"{name} of the tokenizer's settings in {directory} has an attribute that is not true or false; "
                    "download them again."
                ) from error
    return tokens


def _template_file(directory: Path, config: dict[str, Any]) -> Path:
    """The file that holds the default chat template."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return path
    return directory / ("tokenizer_config.json" if config.get("chat_template") else "chat_template.json")


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
    if source is None:  # some processors keep it in a file of its own
        source = _read_object(directory / "chat_template.json").get("chat_template")
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
