"""llama.cpp computes from an exported file what transformers computes from the weights that went in."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from llama_cpp_helpers import choices_agree, dequantized, llama_logits, loss, reference_logits, relative_error
from support.gguf_models import DEMO, MODELS, make_adapter, make_model
from support.sampling import sample

from wgpu_lora.formats.tokenizer.tokenizer import Tokenizer
from wgpu_lora.models.export.adapter_merge import merge_adapter
from wgpu_lora.models.export.gguf_export import FILE_TYPES, export_adapter, export_model

# By file type: how far from the original's logits (a share of their spread) the rounding of weights may lead.
ROUNDING = {"f16": 0.002, "q8_0": 0.03, "q6_k": 0.07, "q5_k_m": 0.13, "q5_1": 0.13, "q5_0": 0.13}
ROUNDING |= {"q4_k_m": 0.25, "q4_1": 0.25, "q4_0": 0.3}


def demo_texts(rows: int = 4) -> list[list[int]]:
    """Ids of held-out conversations."""
    tokenizer = Tokenizer.load(DEMO)
    assert tokenizer is not None
    lines = (DEMO.parent / "data" / "heldout.jsonl").read_text().splitlines()[:rows]
    return [tokenizer.encode(tokenizer.render(json.loads(line)["messages"])) for line in lines]


def some_ids(count: int = 160) -> list[int]:
    return [int(i) for i in np.random.default_rng(5).integers(0, 4093, count)]


@pytest.mark.parametrize("kind", sample([*FILE_TYPES], 1 / 2))
def test_the_demo_in_every_type(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "demo.gguf"
    export_model(DEMO, path, kind)
    dequantized(path, DEMO, tmp_path / "stored")
    losses = []
    for ids in demo_texts():
        actual = llama_logits(path, ids)
        stored, original = reference_logits(tmp_path / "stored", ids), reference_logits(DEMO, ids)
        losses.append([loss(logits, ids) for logits in (actual, stored, original)])
        # llama.cpp rounds activations to 8 bits before matrices of blocks.
        assert relative_error(actual, stored) < (0.002 if kind == "f16" else 0.02)
        assert choices_agree(actual, stored, near=0.01 if kind == "f16" else 0.1)
        assert relative_error(stored, original) < ROUNDING[kind]
    found_loss, stored_loss, original_loss = np.mean(losses, axis=0)
    print(kind, found_loss, stored_loss, original_loss)
    assert abs(found_loss - stored_loss) < (0.0005 if kind == "f16" else 0.01)
    assert found_loss - original_loss < 0.2 * ROUNDING[kind]


@pytest.mark.parametrize(("name", "kind"), sample([*product(MODELS, ["f16", "q8_0", "q4_k_m", "q5_k_m"])], 1 / 3))
def test_every_architecture(tmp_path: Path, name: str, kind: str) -> None:
    model = make_model(tmp_path / name, MODELS[name])
    ids, path = some_ids(), tmp_path / "model.gguf"
    export_model(model, path, kind)
    actual = llama_logits(path, ids)
    stored = reference_logits(dequantized(path, model, tmp_path / "stored"), ids)
    original = reference_logits(model, ids)
    print(name, kind, relative_error(actual, stored), relative_error(stored, original))
    assert relative_error(actual, stored) < (0.003 if kind == "f16" else 0.05)
    assert choices_agree(actual, stored, near=0.02 if kind == "f16" else 0.2)
    assert relative_error(stored, original) < 2 * ROUNDING[kind]  # random weights, where nothing averages out


@pytest.mark.parametrize("name", ["demo", "qwen2", "llama-llama3", "mistral", "phi", "gemma3", "qwen35"])
def test_adapters_merged_and_alone(tmp_path: Path, name: str) -> None:
    model = DEMO if name == "demo" else make_model(tmp_path / "model", MODELS[name])
    # What GGUF has no words for: rsLoRA, and ranks and alphas by module.
    patterns = {"rank_pattern": {"v_proj": 7}, "alpha_pattern": {"down_proj": 3.0}, "use_rslora": name != "qwen2"}
    adapter = make_adapter(tmp_path / "adapter", model, **patterns)
    ids = demo_texts(1)[0] if name == "demo" else some_ids()
    merge_adapter(model, adapter, tmp_path / "merged", "f32")
    expected, base = reference_logits(tmp_path / "merged", ids), reference_logits(model, ids)
    export_model(model, tmp_path / "merged.gguf", "f16", adapter)
    export_model(model, tmp_path / "base.gguf", "f16")
    export_adapter(model, adapter, tmp_path / "lora.gguf")
    merged = llama_logits(tmp_path / "merged.gguf", ids)
    beside = llama_logits(tmp_path / "base.gguf", ids, lora_path=str(tmp_path / "lora.gguf"))
    print(name, relative_error(merged, expected), relative_error(beside, expected), relative_error(base, expected))
    assert relative_error(merged, expected) < 0.005
    assert relative_error(beside, expected) < 0.005
    assert relative_error(base, expected) > 0.2
    assert choices_agree(beside, merged, near=0.03)
