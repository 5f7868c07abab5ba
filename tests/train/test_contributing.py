"""CONTRIBUTING.md's architecture, kernel and objective, built from the page alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from support.training.training import golden_arguments

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.kernel import REGISTRY
from wgpu_lora.models.architectures import ARCHITECTURES, parse_config
from wgpu_lora.train.objectives import OBJECTIVES
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.run.training_log import LOG, read_log


def block(title: str, language: str) -> str:
    """The first block of code of a section of the page."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition(f"### {title}\n")[2]
    match = re.search(rf"^```{language}\n(.*?)^```$", section.partition("\n### ")[0], re.DOTALL | re.MULTILINE)
    assert match, title
    return match[1]


def built(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(text, "CONTRIBUTING.md", "exec"), names)
    return names


def test_the_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "toy", built(block("An architecture", "python"))["Toy"])
    config = parse_config(
        {"model_type": "toy", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        | {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 8, "max_window_layers": 1}
    )
    assert config.max_position_embeddings == 32768
    assert config.parameter_shapes()["model.layers.1.self_attn.k_proj.weight"] == (16, 32)
    assert "model.layers.0.self_attn.q_norm.weight" in config.parameter_shapes()
    assert config.sliding_windows == (None, 8)


def test_the_objective_and_its_kernel(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scaled loss is the scaled loss of SFT, and its kernel passes the comparison of a program's first run."""
    shader = tmp_path / "scaled.wgsl"
    shader.write_text(block("A kernel", "wgsl"))
    names = built(block("An objective", "python").replace("objectives/scaled.wgsl", str(shader)))
    monkeypatch.setitem(OBJECTIVES, "scaled", names["Scaled"])
    losses = {}
    try:
        for objective, own in (("sft", None), ("scaled", "scale=0.5")):
            output = tmp_path / objective
            changes = {"objective": objective, "objective_args": own, "output": str(output)}
            prepare_job(golden_arguments(tmp_path, "qwen2", max_steps=2, tune=False, **changes)).train()
            losses[objective] = [line["loss"] for line in read_log(output / LOG)]
    finally:
        del REGISTRY["scaled_loss"]
    assert losses["scaled"] == pytest.approx([loss / 2 for loss in losses["sft"]], rel=1e-3)
    assert losses["sft"][0] > 0
