"""Writes the config and tokenizer of a GGUF file in the form of a Hugging Face model directory."""

from __future__ import annotations

import json
from pathlib import Path

from wgpu_lora.data.tokenizer import Tokenizer
from wgpu_lora.formats.gguf.header import read_header
from wgpu_lora.models.gguf import config_fields, read_config


def write_companions(path: Path, tokenizer: Tokenizer | None, directory: Path) -> None:
    """Writes config.json and the tokenizer's files, if there is a tokenizer.

    Raises:
        UserError: config.json cannot express the GGUF file's metadata.
    """
    header = read_header(path)
    config = read_config(header)
    stated = {**config_fields(header), **config.gguf().stated(config, path)}
    if config.TRANSFORMERS:
        stated["architectures"] = [config.TRANSFORMERS]
    files = {"config.json": json.dumps(stated, indent=2) + "\n"} | (tokenizer.files() if tokenizer else {})
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(content, encoding="utf-8")
