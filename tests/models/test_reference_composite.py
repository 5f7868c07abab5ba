"""Text parts of larger models: transformers' logits from their directories, and adapters to and from PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.models import full_logits, relative_error

from wgpu_lora.formats.peft_adapter import write_adapter
from wgpu_lora.gpu.device import Device
from wgpu_lora.infer.named_adapters import load_adapters
from wgpu_lora.models.batch_inputs import Segment
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run.adapter_init import initial_adapter
from wgpu_lora.train.run.trained_weights import adapter_tensors

pytestmark = pytest.mark.reference
ROWS = [np.random.default_rng(3).integers(3, 140, length).astype(np.int32) for length in (13, 9)]
TOWERS: dict[str, dict[str, Any]] = {
    "qwen3_5": {"depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "out_hidden_size": 52,
                "patch_size": 4, "num_position_embeddings": 16},
    "mistral3": {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1,
                 "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
}  # fmt: skip
WHOLES = {"qwen3_5": "qwen3_5_text", "gemma3": "gemma3", "mistral3": "mistral", "mistral3-scaled": "ministral3"}


@pytest.fixture(scope="module", params=WHOLES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a vision tower, as transformers saves it, and for Qwen3.5 with a head of several tokens."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from scripts.golden.tiny_models import CONFIGS

    architecture, text = request.param.partition("-")[0], CONFIGS[WHOLES[request.param]]
    if architecture != "gemma3":  # whose golden model is a whole one
        part = {"model_type": WHOLES[request.param], "max_position_embeddings": 128, **text}
        text = {"text_config": part, "vision_config": TOWERS[architecture]}
        text["tie_word_embeddings"] = part["tie_word_embeddings"]
    model = transformers.AutoModelForImageTextToText.from_config(
        transformers.AutoConfig.for_model(architecture, **text)
    )
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    if architecture == "qwen3_5":
        weights = path / "model.safetensors"
        save_file(load_file(weights) | {"mtp.layers.0.mlp.up_proj.weight": np.ones((2, 2), np.float32)}, weights)
    return path


@pytest.fixture
def ours(device: Device, directory: Path) -> LoadedModel:
    model = open_model(str(directory), device, "f32")
    assert "are skipped" in model.notes[0]
    model.load_weights()
    return model


def same(logits: list[np.ndarray], model: Any) -> None:
    """Asserts that a model of transformers or PEFT gives these logits."""
    import torch

    for ids, have in zip(ROWS, logits, strict=True):
        with torch.no_grad():
            want = model(input_ids=torch.from_numpy(ids[None]).long()).logits[0].numpy()
        assert relative_error(have, want) < 1e-4


def with_adapter(model: LoadedModel, adapter: Path) -> list[np.ndarray]:
    """Our logits, which the adapter changes."""
    segments = [Segment(ids) for ids in ROWS]
    logits = full_logits(model, segments, load_adapters(model.device, model.config, [adapter]))
    for have, plain in zip(logits, full_logits(model, segments), strict=True):
        assert relative_error(have, plain) > 0.05
    return logits


def test_logits_and_our_adapters(ours: LoadedModel, directory: Path, tmp_path: Path) -> None:
    """Which PEFT loads over what AutoModelForCausalLM makes of the directory; of mistral3 it makes nothing."""
    import torch
    import transformers
    from peft import PeftModel

    causal = ours.config.architecture != "mistral3"
    kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForImageTextToText
    theirs = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    same(full_logits(ours, [Segment(ids) for ids in ROWS]), theirs)
    args = TrainingArguments(model=str(directory), lora_r=4, lora_alpha=8)
    _, config, _ = initial_adapter(args, ours.config)
    rng = np.random.default_rng(1)
    matrices = {
        module: (rng.normal(0, 0.1, (4, size_in)).astype("f4"), rng.normal(0, 0.1, (out, 4)).astype("f4"))
        for module, (out, size_in) in ours.config.lora_modules.items()
    }
    write_adapter(tmp_path / "adapter", adapter_tensors(matrices, config), config)
    adapted = PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    assert sum(".lora_A." in name for name, _ in adapted.named_parameters()) == len(matrices)
    same(with_adapter(ours, tmp_path / "adapter"), adapted)


def test_adapters_of_the_whole_class(ours: LoadedModel, directory: Path, tmp_path: Path) -> None:
    """Which PEFT made over AutoModelForImageTextToText, with ranks and alphas by path."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=r".*\.language_model\..*(_proj|in_proj_\w+)", task_type="CAUSAL_LM",
        rank_pattern={"model.language_model.layers.1.mlp.up_proj": 2},
        alpha_pattern={r"language_model\.layers\.0\..*": 20},
    )  # fmt: skip
    adapted = get_peft_model(model, config).eval()
    torch.manual_seed(6)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0, 0.1)
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in names)
    peft_config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert "model.language_model.layers.1.mlp.up_proj" in peft_config["rank_pattern"]
    same(with_adapter(ours, tmp_path / "adapter"), adapted)
