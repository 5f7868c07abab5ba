"""What a GGUF file says of its model: read as it is meant, refused by name where it is not supported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from safetensors.numpy import save_file
from support.gguf_files import made_up, tensors_of, write_gguf

from wgpu_lora.errors import UserError
from wgpu_lora.models.model_config import ModelConfig
from wgpu_lora.models.model_files import read_model


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"leave_out": "blk.0.attn_q.weight"}, "blk.0.attn_q.weight is missing"),
        ({"leave_out": "token_embd.weight"}, "has no token_embd.weight"),
        ({"metadata": {"feed_forward_length": 511}}, r"has shape \[512, 256\] but its metadata require \[511, 256\]"),
        ({"metadata": {"block_count": 2}}, "claims 2 layers but holds 12 tensors"),
        ({"metadata": {"block_count": 2**31 - 1}}, "claims 2,147,483,647 layers"),
        ({"metadata": {"attention.head_count": 0}}, "num_attention_heads"),
        ({"metadata": {"attention.head_count_kv": 3}}, "not a multiple"),
        ({"metadata": {"attention.head_count": "four"}}, "is 'four', expected one number"),
        ({"metadata": {"attention.value_length": 32}}, "value_length"),
        ({"metadata": {"rope.dimension_count": 32}}, "rope.dimension_count"),
        ({"metadata": {"rope.scaling.type": "longrope"}}, "rope scaling 'longrope'"),
        ({"metadata": {"rope.freq_base": float("nan")}}, "expected one number"),
        ({"metadata": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.freq_base": 1.0}}, "yarn cannot"),
        ({"metadata": {"expert_count": 8}}, "mixture of experts"),
        ({"metadata": {"general.type": "adapter"}}, "is a GGUF file of type 'adapter'"),
        ({"metadata": {"general.architecture": "gemma4"}}, "architecture 'gemma4'"),
        ({"metadata": {"split.count": 3}}, "one part of a split model"),
        ({"quantize": lambda name, values: (values.astype(np.int32), Kind.I32)}, "stored as I32"),
        ({"metadata": {"tokenizer.ggml.model": "bert"}}, "The tokenizer 'bert'"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, changes: dict, said: str) -> None:
    file = write_gguf(made_up(tmp_path / "source"), tmp_path / "model.gguf", **changes)
    with pytest.raises(UserError, match=said) as caught:
        read_model(file)
    assert str(file) in str(caught.value)


def test_unknown_tensors_are_refused(tmp_path: Path) -> None:
    """A bias that nobody adds would change every result."""
    source = made_up(tmp_path / "source")
    save_file(
        tensors_of(source) | {"model.layers.0.self_attn.q_norm.weight": np.zeros(64, np.float32)},
        source / "model.safetensors",
    )
    with pytest.raises(UserError, match=r"holds 'model.layers.0.self_attn.q_norm.weight'"):
        read_model(write_gguf(source, tmp_path / "model.gguf"))


def test_scaling_and_windows(tmp_path: Path) -> None:
    source = made_up(tmp_path / "source")

    def read(**metadata: int | float | str) -> ModelConfig:
        keys = {key.replace("__", "."): value for key, value in metadata.items()}
        return read_model(write_gguf(source, tmp_path / "model.gguf", metadata=keys)).config

    assert read(rope__scaling__type="none").rope_scaling is None
    linear = read(rope__scaling__factor=4.0).rope_scaling  # llama.cpp's default kind
    assert linear is not None
    assert (linear.rope_type, linear.factor) == ("linear", 4.0)
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    found = read(**yarn, rope__scaling__original_context_length=16, rope__scaling__yarn_beta_fast=30.0).rope_scaling
    assert found is not None
    assert (found.original_max_position_embeddings, found.beta_fast) == (16, 30.0)
    usual = 0.1 * np.log(4) + 1
    assert found.attention_factor == pytest.approx(usual)
    half = read(**yarn, rope__scaling__attn_factor=0.5).rope_scaling
    assert half is not None
    assert half.attention_factor == pytest.approx(usual / 2)
    config = read(attention__sliding_window=16)
    assert (config.architecture, config.sliding_windows) == ("mistral", (16,))
