"""Adapters that PEFT made over the class of a whole model, by that class's names of modules."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import MODELS, path_of
from support.models import full_logits, golden, golden_rows
from support.training.training import random_rows

from wgpu_lora.errors import UserError
from wgpu_lora.formats.peft_adapter import CONFIG, WEIGHTS, tensor_name
from wgpu_lora.gpu.device import Device
from wgpu_lora.infer.named_adapters import load_adapters
from wgpu_lora.models.adapter_modules import expression, read_adapter_for, resolve_target_modules
from wgpu_lora.models.architectures import load_config, parse_config
from wgpu_lora.models.batch_inputs import Segment
from wgpu_lora.models.export.adapter_merge import merge_adapter
from wgpu_lora.models.export.quantized_model import write_packed
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.models.model_config import ModelConfig
from wgpu_lora.models.model_files import config_of
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.run.adapter_init import frozen_adapter

TEXT, WHOLE = "model.", "model.language_model."
OPTIONS: dict[str, Any] = {
    "lora_r": 4, "max_length": 16, "packing": False, "per_device_train_batch_size": 2, "save_steps": 1,
    "gradient_accumulation_steps": 1, "warmup_ratio": 0.0,
}  # fmt: skip
EYE = "model.visual.blocks.0.attn.qkv"


def mistral3() -> ModelConfig:
    text = json.loads((MODELS / "mistral" / "config.json").read_text())
    return parse_config({"model_type": "mistral3", "text_config": text})


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The golden qwen3_5_text as the text part of a larger model."""
    source, directory = MODELS / "qwen3_5_text", tmp_path / "base"
    directory.mkdir()
    tensors = {name.replace(TEXT, WHOLE, 1): value for name, value in load_file(source / "model.safetensors").items()}
    tensors |= {f"{EYE}.weight": np.ones((2, 3), np.float16), "mtp.fc.weight": np.ones((2, 2), np.float32)}
    save_file(tensors, directory / "model.safetensors")
    text = json.loads((source / "config.json").read_text())
    whole = {"model_type": "qwen3_5", "dtype": "float16", "eos_token_id": [3, 4], "text_config": text}
    (directory / "config.json").write_text(json.dumps(whole | {"tie_word_embeddings": text["tie_word_embeddings"]}))
    return directory


def golden_logits(path: Path, device: Device, base_dtype: str = "nf4") -> list[np.ndarray]:
    model = open_model(str(path), device, base_dtype)
    model.load_weights()
    return full_logits(model, [Segment(ids) for ids in golden_rows(golden("qwen3_5_text"), "input_ids")])


def test_the_text_part_is_read(device: Device, base: Path) -> None:
    opened = open_model(str(base), device, "f32")
    assert opened.notes == ["only the text part of this model is used: 2 tensors of visual and mtp are skipped"]
    assert opened.config.eos_token_ids == (3, 4)
    expected = golden_rows(golden("qwen3_5_text"), "logits.f32")
    for have, want in zip(golden_logits(base, device, "f32"), expected, strict=True):
        np.testing.assert_allclose(have, want, rtol=0, atol=1e-4 * np.abs(want).max())


def test_what_is_written_is_a_whole_model(device: Device, base: Path, tmp_path: Path) -> None:
    merge_adapter(base, golden_adapter(tmp_path / "adapter", TEXT), tmp_path / "merged", "f32")
    write_packed(open_model(str(base), device, "nf4"), tmp_path / "packed")
    before = load_file(base / "model.safetensors")
    for name in ("merged", "packed"):
        after = load_file(tmp_path / name / "model.safetensors")
        assert before.keys() <= after.keys()
        np.testing.assert_array_equal(after[f"{EYE}.weight"], before[f"{EYE}.weight"])
        assert after[f"{EYE}.weight"].dtype == np.float16
    stated = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert {"lm_head", "visual", "model.visual"} <= set(stated["quantization_config"]["llm_int8_skip_modules"])
    expected = golden_logits(base, device)
    for have, want in zip(golden_logits(tmp_path / "packed", device), expected, strict=True):
        np.testing.assert_array_equal(have, want)


def test_targets_match_no_other_part() -> None:
    config, layers = config_of(MODELS / "gemma3"), r"model\.language_model\.layers\.\d+\."
    assert expression(resolve_target_modules("q_proj,mlp", config), config) == (
        rf"{layers}(?:self_attn\.q_proj|mlp\.gate_proj|mlp\.up_proj|mlp\.down_proj)"
    )
    module = "model.language_model.layers.1.self_attn.v_proj"
    assert expression([module], config) == module.replace(".", r"\.")
    every = resolve_target_modules("all-linear", config)
    assert resolve_target_modules(expression(every, config), config) == list(config.lora_modules)


def write_adapter(directory: Path, modules: dict[str, tuple[np.ndarray, np.ndarray]], **changes: Any) -> Path:
    directory.mkdir()
    tensors = {}
    for module, (a, b) in modules.items():
        tensors |= {tensor_name(module, "A"): a, tensor_name(module, "B"): b}
    save_file(tensors, directory / WEIGHTS)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": r".*\.language_model\..*", **changes}
    (directory / CONFIG).write_text(json.dumps(settings))
    return directory


def golden_adapter(directory: Path, prefix: str) -> Path:
    """That of qwen3_5_text, with names that begin so, a rank of its own by path and alphas by expression."""
    modules, values = {}, golden("qwen3_5_text")
    for name in [name for name in values if name.startswith("adapter.") and name.endswith(".A")]:
        _, layer, module, _ = name.split(".")
        a, b = values[name], values[f"{name[:-1]}B"]
        if module == "out_proj":
            a, b = a[:2], np.ascontiguousarray(b[:, :2])
        modules[path_of(layer, module).replace(TEXT, prefix, 1)] = a, b
    ranks = {f"{prefix}layers.0.linear_attn.out_proj": 2}
    alphas = {rf"^{prefix}layers\.\d+\.mlp\..*": 20, f"{prefix}layers.1.self_attn.q_proj": 3}
    return write_adapter(directory, modules, rank_pattern=ranks, alpha_pattern=alphas)


def test_either_names_are_the_same_adapter(device: Device, base: Path, tmp_path: Path) -> None:
    model = open_model(str(base), device, "f32")
    model.load_weights()
    plain, whole = (golden_adapter(tmp_path / prefix, prefix) for prefix in (TEXT, WHOLE))
    segments = [Segment(ids) for ids in golden_rows(golden("qwen3_5_text"), "input_ids")]
    logits = [full_logits(model, segments, load_adapters(device, model.config, [item])) for item in (plain, whole)]
    for have, want in zip(*logits, strict=True):
        np.testing.assert_array_equal(have, want)
    assert frozen_adapter(plain, model.config).digest == frozen_adapter(whole, model.config).digest
    for place, adapter in (("a", plain), ("b", whole)):
        merge_adapter(base, adapter, tmp_path / place, "f32")
    contents = [(tmp_path / place / "model.safetensors").read_bytes() for place in "ab"]
    assert contents[0] == contents[1] != (base / "model.safetensors").read_bytes()


def test_what_is_saved_has_the_names_of_the_text_part(device: Device, base: Path, tmp_path: Path) -> None:
    """Of a run that goes on from such an adapter, also when it is resumed."""
    whole, saved = golden_adapter(tmp_path / "whole", WHOLE), tmp_path / "saved"
    data = str(random_rows(tmp_path / "rows.jsonl", 8, 140))
    own = {**OPTIONS, "model": str(base), "data": data, "output": str(saved), "base_dtype": "f32"}
    for more in ({"init_adapter": str(whole), "max_steps": 2}, {"resume": True, "max_steps": 3}):
        args = TrainingArguments(**{**own, **more})
        job = prepare_job(args, open_model(str(base), device, "f32"))
        job.train()
    config, placed = config_of(base), {}
    session: Any = SimpleNamespace(model=job.session.model, place_initial=lambda _, matrices: placed.update(matrices))
    job.run.trainable.load_initial(session, 0, job.run.resumed_from)  # what a diverged run goes back to
    assert list(placed) == list(read_adapter_for(config, whole)[1])
    before, after = (read_adapter_for(config, directory)[0] for directory in (whole, saved))
    names = {tensor_name(module, factor) for module in config.lora_modules for factor in "AB"}
    assert load_file(saved / WEIGHTS).keys() == names
    for module in config.lora_modules:
        assert (after.rank(module), after.scaling(module)) == (before.rank(module), before.scaling(module))
    assert {after.rank(module) for module in config.lora_modules} == {2, 4}
    assert {after.alpha(module) for module in config.lora_modules} == {3, 8, 20}
    assert isinstance(after.target_modules, str)
    assert resolve_target_modules(after.target_modules, config) == list(config.lora_modules)


@pytest.mark.parametrize("names", ["language_model.model.layers", "model.language_model.layers"])
@pytest.mark.parametrize("config", [config_of(MODELS / "gemma3"), mistral3()], ids=["gemma3", "mistral3"])
def test_names_of_all_versions_of_transformers(config: ModelConfig, names: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    modules = {
        module: (rng.random((4, size_in), np.float32), rng.random((out, 4), np.float32))
        for module, (out, size_in) in config.lora_modules.items()
    }
    stored = {module.replace(config.LAYERS, names, 1): pair for module, pair in modules.items()}
    patterns = {f"{names}.1.self_attn.k_proj": 16}
    adapter, matrices = read_adapter_for(config, write_adapter(tmp_path / "adapter", stored, alpha_pattern=patterns))
    assert list(matrices) == list(read_adapter_for(config, tmp_path / "adapter")[1])
    for module, pair in modules.items():
        assert adapter.scaling(module) == (4 if module.endswith(".1.self_attn.k_proj") else 2)
        for have, want in zip(matrices[module], pair, strict=True):
            np.testing.assert_array_equal(have, want)


OTHER_PART = "it has {}, but only the text part of this model is used: train it on"
UP = path_of(0, "up_proj")


@pytest.mark.parametrize(
    ("architecture", "modules", "message"),
    [
        ("qwen3_5_text", [EYE], OTHER_PART),
        ("gemma3", ["model.vision_tower.encoder.layers.0.self_attn.q_proj"], OTHER_PART),
        ("gemma3", ["vision_tower.vision_model.encoder.layers.0.self_attn.q_proj"], OTHER_PART),
        ("qwen3_5_text", [UP, UP.replace(TEXT, WHOLE, 1)], "adapter holds {} under two names: save it again"),
    ],
)
def test_modules_that_are_refused(architecture: str, modules: list[str], message: str, tmp_path: Path) -> None:
    config = config_of(MODELS / architecture)
    out, size_in = config.lora_modules.get(modules[0], (2, 3))
    pair = np.ones((4, size_in), np.float32), np.ones((out, 4), np.float32)
    adapter = write_adapter(tmp_path / "adapter", dict.fromkeys(modules, pair))
    with pytest.raises(UserError, match=message.format(modules[0])):
        read_adapter_for(config, adapter)


@pytest.mark.parametrize(
    ("text", "kind"), [("gemma3_text", "gemma3"), ("ministral3", "mistral3"), ("mistral", "mistral3")]
)
def test_an_adapter_of_the_whole_fits_its_text_part(tmp_path: Path, text: str, kind: str) -> None:
    """Which a GGUF file is read as."""
    config = load_config(MODELS / text)
    module = "model.layers.0.mlp.up_proj"
    out, size_in = config.lora_modules[module]
    pair = np.ones((2, size_in), np.float32), np.ones((out, 2), np.float32)
    adapter = write_adapter(tmp_path / "adapter", {module.replace(TEXT, WHOLE): pair}, r=2, lora_alpha=4)
    assert [*read_adapter_for(config, adapter)[1]] == [module]
    # And back: one that was trained on the text part alone fits the whole.
    settings = {"model_type": kind, "text_config": json.loads((MODELS / text / "config.json").read_text())}
    plain = write_adapter(tmp_path / "plain", {module: pair}, r=2, lora_alpha=4)
    assert [*read_adapter_for(parse_config(settings), plain)[1]] == [module.replace(TEXT, WHOLE)]
