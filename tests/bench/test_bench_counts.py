"""What formulas count of a model, beside the numbers that are written out here."""

from __future__ import annotations

import pytest

from wgpu_lora.bench.contract import numbers_of
from wgpu_lora.bench.larger_models import operations
from wgpu_lora.models.published_shapes import cut, shape_config

COUNTED = ("linear_weights", "matrix_weights", "linear_sizes", "first_modules", "first_outputs", "attention_layers")
COUNTED += ("state_values",)


def counted(shape: str, layers: int) -> dict[str, float]:
    numbers = numbers_of(cut(shape_config(shape), layers))
    return {name: numbers[name] for name in COUNTED}


def test_the_common_decoder() -> None:
    d, q, kv, inner = 896, 896, 128, 4864
    weights = 2 * d * (q + kv) + 3 * d * inner
    assert counted("qwen2.5-0.5b", 3) == {
        "linear_weights": 3 * weights,
        "matrix_weights": 3 * weights,
        "linear_sizes": 3 * (7 * d + 2 * q + 2 * kv + 3 * inner),
        "first_modules": 3,
        "first_outputs": q + 2 * kv,
        "attention_layers": 3,
        "state_values": 0,
    }


def test_fused_matrices() -> None:
    found = counted("phi-4-mini", 1)
    assert (found["first_modules"], found["first_outputs"]) == (1, 3072 + 2 * 1024)


def test_delta_nets() -> None:
    d, heads, values, inner = 1024, 16, 2048, 3584
    net, mlp = {"qkv": 3 * values, "z": values, "b": heads, "a": heads}, 3 * d * inner
    delta, attention = d * sum(net.values()) + values * d, d * (2 * 2048 + 2 * 512) + 2048 * d
    found = counted("qwen3.5-0.8b", 4)
    assert found["linear_weights"] == 3 * delta + attention + 4 * mlp
    assert found["matrix_weights"] == found["linear_weights"] - 3 * 2 * heads * d  # b and a stay as they are
    assert (found["first_modules"], found["first_outputs"]) == (4, sum(net.values()))
    assert (found["attention_layers"], found["state_values"]) == (1, 3 * heads * 128 * 128)


def test_training_on_delta_nets_counts_the_recurrence_in_proportion_to_tokens() -> None:
    config = cut(shape_config("qwen3.5-0.8b"), 3)  # without attention
    short, long = (operations(config, 16, tokens) for tokens in (1000.0, 2000.0))
    head = 4 * config.vocab_size * config.hidden_size
    assert long + head == pytest.approx(2 * (short + head), rel=1e-12)
    n, d = numbers_of(config), config.hidden_size
    products = 4 * n["linear_weights"] - 2 * d * n["first_outputs"] + 6 * 16 * n["linear_sizes"] - 2 * 16 * d * 4
    assert short == pytest.approx(1000 * (products + 18 * 3 * 16 * 128 * 128) + 999 * head, rel=1e-12)
