"""Adapters as PEFT writes them, with options that affect the result, and the logits that PEFT computes with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from golden.models import load

# name -> (model, LoraConfig's options)
CASES: dict[str, tuple[str, dict]] = {
    "patterns": ("qwen2", {
        "r": 4, "lora_alpha": 8, "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 6, "^model.layers.2.self_attn.v_proj": 1},
        "alpha_pattern": {"v_proj": 3, r"layers\.[01]\.mlp\.down_proj": 20},
    }),
    "rslora": ("llama", {"r": 4, "lora_alpha": 3, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]}),
    "expression": ("mistral", {"r": 3, "target_modules": r".*layers\.1\.(self_attn\.v_proj|mlp\.gate_proj)"}),
    "rslora-patterns": ("qwen3", {
        "r": 2, "lora_alpha": 5, "use_rslora": True, "target_modules": ["k_proj", "o_proj", "up_proj"],
        "rank_pattern": {"o_proj": 7}, "alpha_pattern": {"k_proj": 9},
    }),
    "dora-patterns": ("llama", {
        "r": 4, "lora_alpha": 6, "use_dora": True, "use_rslora": True, "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 2, "up_proj": 6}, "alpha_pattern": {"v_proj": 3},
    }),
}  # fmt: skip


def save_adapter(name: str, models: Path, directory: Path) -> None:
    """Writes an adapter with PEFT, whose B is not zero."""
    architecture, options = CASES[name]
    torch.manual_seed(sum(map(ord, name)))
    model = get_peft_model(load(models / architecture), LoraConfig(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for key, value in model.named_parameters():
            if ".lora_B." in key:
                value.normal_(std=0.3)
            elif ".lora_magnitude_vector." in key:
                value.mul_(torch.empty_like(value).uniform_(0.7, 1.3))
    model.peft_config["default"].base_model_name_or_path = architecture
    model.save_pretrained(directory, save_embedding_layers=False)
    (directory / "README.md").unlink(missing_ok=True)


def logits(name: str, models: Path, directory: Path, input_ids: np.ndarray) -> np.ndarray:
    """Logits that PEFT computes with the adapter in a directory: float32 [rows, tokens, vocab]."""
    model = PeftModel.from_pretrained(load(models / CASES[name][0]), directory)
    with torch.no_grad():
        return model(input_ids=torch.tensor(input_ids, dtype=torch.long)).logits.float().numpy()
