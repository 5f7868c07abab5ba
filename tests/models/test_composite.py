"""A language model that is part of a larger one: names, skipped tensors, and what is written of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import MODELS
from support.models import full_logits, golden, golden_rows

from wgpu_lora.errors import UserError
from wgpu_lora.export.adapter_merge import merge_adapter
from wgpu_lora.export.quantized_model import write_packed
from wgpu_lora.formats.peft_adapter import tensor_name, write_adapter
from wgpu_lora.formats.peft_config import AdapterConfig
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.adapter_modules import expression, resolve_target_modules
from wgpu_lora.models.architectures import ARCHITECTURES, parse_config
from wgpu_lora.models.architectures.qwen3 import Qwen3
from wgpu_lora.models.batch_inputs import Segment
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.models.multimodal import TextPart

TOWER = "vision_tower.encoder.layers.0.self_attn.q_proj.weight"


class Whole(TextPart, Qwen3):
    TEXT_TYPES = ("qwen3",)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    ARCHITECTURES["whole"] = Whole
    yield
    del ARCHITECTURES["whole"]


@pytest.fixture(scope="module", params=["language_model.model.", "model.language_model."])
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden qwen3 as part of a model with a vision tower, with either names."""
    directory, source = tmp_path_factory.mktemp("whole"), MODELS / "qwen3"
    tensors = {
        name.replace("model.", request.param, 1): values
        for name, values in load_file(source / "model.safetensors").items()
    }
    if request.param.startswith("language_model."):
        tensors["language_model.lm_head.weight"] = tensors.pop("lm_head.weight")
    tensors |= {TOWER: np.arange(6, dtype=np.float32).reshape(2, 3), "multi_modal_projector.w": np.ones(3, np.float16)}
    save_file(tensors, directory / "model.safetensors")
    text = json.loads((source / "config.json").read_text())
    whole = {"model_type": "whole", "dtype": "float16", "eos_token_id": [3, 4], "text_config": text}
    whole["tie_word_embeddings"] = text.pop("tie_word_embeddings")
    (directory / "config.json").write_text(json.dumps(whole))
    return directory


def logits(model: LoadedModel) -> list[np.ndarray]:
    model.load_weights()
    return full_logits(model, [Segment(ids) for ids in golden_rows(golden("qwen3"), "input_ids")])


def test_the_text_part_is_read(device: Device, model: Path) -> None:
    opened = open_model(str(model), device, "f32")
    assert opened.notes == [
        "only the text part of this model is used: 2 tensors of multi_modal_projector and vision_tower are skipped"
    ]
    assert opened.config.eos_token_ids == (3, 4)
    assert not opened.config.tie_word_embeddings
    assert next(iter(opened.config.lora_modules)) == "model.language_model.layers.0.self_attn.q_proj"
    for have, want in zip(logits(opened), golden_rows(golden("qwen3"), "logits.f32"), strict=True):
        np.testing.assert_allclose(have, want, rtol=0, atol=1e-4 * np.abs(want).max())


def test_what_is_written_is_a_whole_model(device: Device, model: Path, tmp_path: Path) -> None:
    tensors, rng = {}, np.random.default_rng(0)
    opened = open_model(str(model), device, "nf4")
    for module, (out, size_in) in opened.config.lora_modules.items():
        tensors[tensor_name(module, "A")] = rng.normal(0, 0.1, (2, size_in)).astype(np.float32)
        tensors[tensor_name(module, "B")] = rng.normal(0, 0.1, (out, 2)).astype(np.float32)
    write_adapter(tmp_path / "adapter", tensors, AdapterConfig(r=2, lora_alpha=2))
    merge_adapter(model, tmp_path / "adapter", tmp_path / "merged", "f32")
    write_packed(opened, tmp_path / "packed")
    before = load_file(model / "model.safetensors")
    for name in ("merged", "packed"):
        after = load_file(tmp_path / name / "model.safetensors")
        assert before.keys() <= after.keys()
        np.testing.assert_array_equal(after[TOWER], before[TOWER])
        assert after["multi_modal_projector.w"].dtype == np.float16
    stated = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert stated["text_config"]["hidden_size"] == 48
    skipped = stated["quantization_config"]["llm_int8_skip_modules"]
    assert {"lm_head", "vision_tower", "model.vision_tower", "model.multi_modal_projector"} <= set(skipped)
    again = open_model(str(tmp_path / "packed"), device)
    assert again.decoder.base_dtype == "nf4"
    for have, want in zip(logits(again), logits(opened), strict=True):
        np.testing.assert_array_equal(have, want)


def test_targets_match_no_other_part(model: Path) -> None:
    config = parse_config(json.loads((model / "config.json").read_text()))
    assert expression(resolve_target_modules("q_proj,mlp", config), config) == (
        r"model\.language_model\.layers\.\d+\.(?:self_attn\.q_proj|mlp\.gate_proj|mlp\.up_proj|mlp\.down_proj)"
    )
    one = "model.language_model.layers.1.self_attn.v_proj"
    assert expression([one], config) == one.replace(".", r"\.")
    assert resolve_target_modules(expression(resolve_target_modules("all-linear", config), config), config) == list(
        config.lora_modules
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, r"text_config is missing from config\.json"),
        ({"text_config": {"model_type": "bert"}}, "model_type 'bert', which is not supported in whole"),
        ({"text_config": {"hidden_size": 8}}, r"vocab_size is missing from config\.json"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_config({"model_type": "whole", **changes})
