"""Logits of every architecture and base dtype against transformers (NF4: with the weights bitsandbytes gives back)."""

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.models import ARCHITECTURES, FIXTURES, full_logits, golden, golden_rows, load, relative_error

from wgpu_lora.infer.named_adapters import load_adapters
from wgpu_lora.models.adapter_set import fix_gains
from wgpu_lora.models.batch_inputs import Segment


def golden_segments(architecture):
    return [Segment(ids) for ids in golden_rows(golden(architecture), "input_ids")]


@pytest.mark.parametrize(
    ("architecture", "base"),
    [
        pytest.param(a, b, marks=[pytest.mark.drivers] if (a, b) in (("qwen3", "nf4"), ("gemma2", "nf4")) else [])
        for a in ARCHITECTURES
        for b in ("f32", "nf4")
    ],
)
def test_logits_equal_the_golden_ones(device, architecture, base):
    logits = full_logits(load(architecture, device, base), golden_segments(architecture))
    expected = golden_rows(golden(architecture), f"logits.{base}")
    for i, (have, want) in enumerate(zip(logits, expected, strict=True)):
        assert relative_error(have, want) < 1e-4, f"row {i}"


@pytest.mark.parametrize(("base", "bound"), [("bf16", 2e-2), ("f16", 2e-3)])
def test_half_precision_bases_are_close_to_f32(device, base, bound):
    # llama's fixture is stored as f32, so both truly round
    logits = full_logits(load("llama", device, base), golden_segments("llama"))
    for have, want in zip(logits, golden_rows(golden("llama"), "logits.f32"), strict=True):
        assert 1e-6 < relative_error(have, want) < bound


def test_neighbours_in_a_packed_batch_do_not_see_each_other(device):
    model, segments = load("qwen2", device), golden_segments("qwen2")
    together = full_logits(model, segments)
    alone = [full_logits(model, [segment])[0] for segment in segments]
    for have, want in zip(together, alone, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("patterns", "qwen2"),
        ("rslora", "llama"),
        ("expression", "mistral"),
        ("rslora-patterns", "qwen3"),
        ("dora-patterns", "llama"),
    ],
)
def test_pefts_own_adapters_give_pefts_logits(device, name, architecture):
    # Ranks and alphas by pattern, rsLoRA, DoRA, targets by list and by expression: tests/fixtures/README.md.
    stored = load_file(FIXTURES / "golden" / "peft.safetensors")
    model = load(architecture, device)
    adapters = load_adapters(device, model.config, [FIXTURES / "peft" / name])
    fix_gains(model, adapters)
    segments = [Segment(stored[f"{name}.input_ids"][0])]
    (plain,), (actual,) = full_logits(model, segments), full_logits(model, segments, adapters)
    (expected,) = stored[f"{name}.logits"]
    assert relative_error(actual, expected) < 1e-4
    assert relative_error(plain, expected) > 0.02
