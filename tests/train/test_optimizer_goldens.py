"""200 steps of optimizers against torch's, bitsandbytes' and PEFT's on the same gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.models import FIXTURES
from support.optimizing import GOLDEN_LIMITS, Optimizing

from wgpu_lora.gpu.device import Device

MODULES = {"a": (40, 640), "b": (520, 30)}
RANK, STEPS, RATE = 8, 200, 1e-3
NAMES = ("a.A", "a.B", "b.A", "b.B")
# Case -> options, where they are more than its name.
OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"optim_args": "momentum=0.9,nesterov=true"},
    "loraplus": {"optim": "adamw", "loraplus_lr_ratio": 4.0},
}


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return load_file(FIXTURES / "golden" / "optimizers.safetensors")


def gradients(golden: dict[str, np.ndarray], step: int) -> dict[str, np.ndarray]:
    return {name: golden["weights"][step] * golden[f"gradients.{name}"][step % 10] for name in NAMES}


def trained(device: Device, golden: dict[str, np.ndarray], **options: Any) -> dict[str, np.ndarray]:
    """After all steps, in the first of two slots; the other one has a larger rank, and takes no step."""
    run = Optimizing(device, MODULES, (RANK, RANK), weight_decay=0.01, max_grad_norm=0.0, **options)
    run.write(0, {name: golden[f"initial.{name}"] for name in NAMES})
    for step in range(STEPS):
        assert run.step({0: gradients(golden, step)}, step + 1, RATE)[0].applied
    found = run.read(0)
    run.close()
    return found


def distance(found: dict[str, np.ndarray], golden: dict[str, np.ndarray], case: str) -> dict[str, float]:
    """By matrix, relative to the way from the initial values."""
    return {
        name: float(
            np.linalg.norm(found[name] - (want := golden[f"{case}.{name}"]))
            / np.linalg.norm(want - golden[f"initial.{name}"])
        )
        for name in NAMES
    }


@pytest.mark.parametrize("case", GOLDEN_LIMITS)
def test_200_steps(device: Device, golden: dict[str, np.ndarray], case: str) -> None:
    found = distance(trained(device, golden, **{"optim": case, **OPTIONS.get(case, {})}), golden, case)
    assert max(found.values()) < GOLDEN_LIMITS[case], found


def orthogonalised(x: np.ndarray) -> np.ndarray:
    """Five iterations of Newton-Schulz in float64, as Jordan's muon.py has them."""
    y = x.T if x.shape[0] > x.shape[1] else x
    y = y / max(float(np.linalg.norm(y)), 1e-7)
    for _ in range(5):
        gram = y @ y.T
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    return y.T if x.shape[0] > x.shape[1] else y


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_muon_in_float64(device: Device, golden: dict[str, np.ndarray], adjust: str) -> None:
    """20 steps; on the whole matrix instead of its small side, and without bf16."""
    initial = {name: golden[f"initial.{name}"] for name in NAMES}
    options = {"optim": "muon", "optim_args": f"adjust_lr_fn={adjust}", "max_grad_norm": 0.0, "weight_decay": 0.1}
    run = Optimizing(device, MODULES, (RANK, RANK + 3), **options)
    run.write(0, initial)
    want = {name: values.astype(np.float64) for name, values in initial.items()}
    momentum = {name: np.zeros_like(values) for name, values in want.items()}
    for step in range(20):
        given = gradients(golden, step)
        assert run.step({0: given}, step + 1, RATE)[0].applied
        for name, g in given.items():
            momentum[name] += 0.05 * (g - momentum[name])
            rows, cols = g.shape
            scale = 0.2 * max(rows, cols) ** 0.5 if adjust == "match_rms_adamw" else max(1, rows / cols) ** 0.5
            moved = scale * orthogonalised(g + 0.95 * (momentum[name] - g))
            want[name] = want[name] * (1 - RATE * 0.1) - RATE * moved
    found = run.read(0)
    run.close()
    for name, values in want.items():
        assert np.linalg.norm(found[name] - values) < 1e-4 * np.linalg.norm(values - initial[name])
