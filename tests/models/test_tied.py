"""An LM head beside an embedding that config.json says is tied."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.gguf_models import small

from wgpu_lora.errors import UserError
from wgpu_lora.models import model_files
from wgpu_lora.models.model_files import read_model

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def beside(directory: Path, head: np.ndarray) -> Path:
    model = small(directory, "qwen2", tie_word_embeddings=True)
    weights = load_file(model / "model.safetensors")
    save_file(weights | {HEAD: head}, model / "model.safetensors", metadata={"format": "pt"})
    return model


def embedding(directory: Path) -> np.ndarray:
    return load_file(small(directory, "qwen2", tie_word_embeddings=True) / "model.safetensors")[EMBEDDING]


def test_a_copy_is_passed_over(tmp_path: Path) -> None:
    values = embedding(tmp_path / "plain")
    assert HEAD not in read_model(beside(tmp_path / "copy", values)).config.parameters
    assert HEAD not in read_model(beside(tmp_path / "wider", values.astype(np.float32))).config.parameters


@pytest.mark.parametrize("row", [0, 63, 64, 4095, None])
def test_another_head_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: int | None) -> None:
    """transformers would use it. Compared by pieces of 64 rows. None: of another shape."""
    monkeypatch.setattr(model_files, "_AT_A_TIME", 64 * 64)
    values = embedding(tmp_path / "plain")
    if row is not None:
        values[row, 5] += 1
    model = beside(tmp_path / "other", values[:-1] if row is None else values)
    with pytest.raises(UserError, match=f"{HEAD} in .* differs from {EMBEDDING}, although config.json ties them"):
        read_model(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))  # as the message says
    if row is not None:
        assert HEAD in read_model(model).config.parameters
