"""Qwen3.5: its config, its names alone and as the text part of a larger model, and the rows of its delta nets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import MODELS

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.architectures import parse_config
from wgpu_lora.models.blocks.delta_net import Runs
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.models.published_shapes import shape_config
from wgpu_lora.models.row_inputs import NOWHERE, Rows

SOURCE = MODELS / "qwen3_5_text"
LINEAR = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")


def stated(**changes: Any) -> dict[str, Any]:
    return {**json.loads((SOURCE / "config.json").read_text()), **changes}


def test_every_fourth_layer_is_full_attention_unless_stated() -> None:
    assert parse_config(stated()).linear_layers == (True, False)
    unsaid = {**stated(), "num_hidden_layers": 5, "layer_types": None}
    assert parse_config(unsaid).linear_layers == (True, True, True, False, True)
    assert parse_config({**unsaid, "full_attention_interval": 2}).linear_layers == (True, False, True, False, True)
    assert parse_config(unsaid).cut(3).linear_layers == (True, True, True)


def test_all_linear_layers_may_have_adapters() -> None:
    modules = [path.rpartition(".")[2] for path in shape_config("qwen3.5-9b").lora_modules]
    assert {name: modules.count(name) for name in LINEAR} == dict.fromkeys(LINEAR, 24)
    assert modules.count("q_proj") == 8
    assert modules.count("up_proj") == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_key_heads": 4}, "linear_num_value_heads 6 in .* is not a multiple of linear_num_key_heads 4"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads in .* is 0"),
        ({"linear_key_head_dim": 6}, "linear_key_head_dim 6 in .* is not a multiple of 4"),
        ({"linear_value_head_dim": "12"}, "linear_value_head_dim in .* is '12'"),
        ({"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim in .* is 9, expected a whole number from 1 to 8"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim in .* is 1, expected 2 to 8"),
        ({"layer_types": ["linear_attention"]}, "layer_types in .* must list 2 layers"),
        (
            {"layer_types": ["linear_attention", "sliding_attention"]},
            "layer_types in .* has 'sliding_attention', which is not supported",
        ),
        ({"layer_types": 3}, "layer_types in .* must list 2 layers"),
        ({"num_attention_heads": 3}, "num_attention_heads 3 in .* is not a multiple of num_key_value_heads 2"),
        ({"hidden_size": None}, "hidden_size is missing from"),
        ({"head_dim": 20}, "partial_rotary_factor|rotary"),  # five values are no pairs
    ],
)
def test_impossible_fields_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_config(stated(**changes))


def test_a_text_model_may_be_stored_under_the_names_of_the_whole(device: Device, tmp_path: Path) -> None:
    tensors = {
        name.replace("model.", "model.language_model.", 1): values
        for name, values in load_file(SOURCE / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(stated()))
    model = open_model(str(tmp_path), device, "f32")
    model.load_weights()
    assert not model.notes


def test_small_matrices_stay_as_they_are(device: Device) -> None:
    linears = open_model(str(SOURCE), device).decoder.layers[0].linears
    formats = {module.rpartition(".")[2]: linear.weight.format for module, linear in linears.items()}
    assert {name for name, kind in formats.items() if kind != "nf4"} == {"in_proj_a", "in_proj_b"}


def test_runs() -> None:
    """Two sequences, of which the second goes on from five tokens before the batch."""

    def each(*values: int) -> np.ndarray:
        return np.array(values)

    keys, first = each(0, 1, 2, 25, 26), each(0, 0, 0, 20, 20)
    rows = Rows.causal(each(0, 1, 2, 5, 6), each(0, 0, 0, 3, 3), keys, first, each(0, 0, 0, 0, 0))
    found = Runs().values(rows)
    assert found.tolist() == [[0, 3, 0, 0], [1, 2, 0, 0], [2, 1, 0, 0], [0, 2, 3, 1], [1, 1, 3, 1]]
    assert Runs().padding(found).tolist() == [0, 1, NOWHERE, 0]
