"""200 steps of optimizers against torch's, bitsandbytes' and PEFT's on the same gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.models import FIXTURES
from support.optimizing import Optimizing

from wgpu_lora.gpu.device import Device

MODULES = {"a": (40, 640), "b": (520, 30)}
RANK, STEPS, RATE = 8, 200, 1e-3
NAMES = ("a.A", "a.B", "b.A", "b.B")
# Case -> options, and the limit of the distance relative to the way from the initial values. bitsandbytes' Lion rounds
# the sign of sums that are almost 0 as this one does not; torch's Muon computes in bf16.
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "adamw": ({}, 1e-5),
    "adamw_8bit": ({}, 1e-2),
    "lion": ({}, 1e-2),
    "lion_8bit": ({}, 1e-2),
    "sgd": ({"optim_args": "momentum=0.9,nesterov=true"}, 1e-5),
    "loraplus": ({"optim": "adamw", "loraplus_lr_ratio": 4.0}, 1e-5),
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


@pytest.mark.parametrize("case", CASES)
def test_200_steps(device: Device, golden: dict[str, np.ndarray], case: str) -> None:
    options, limit = CASES[case]
    found = distance(trained(device, golden, **{"optim": case, **options}), golden, case)
    print(case, found)
    assert max(found.values()) < limit
