"""What a proof says of the devices that it was done on, and how many real GPUs it wants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wgpu_lora.gpu.device_list import DeviceInfo
from wgpu_lora.proof.checks import devices_compute
from wgpu_lora.proof.proof_context import LEFT_OUT, Check, Proof, Result
from wgpu_lora.proof.proof_run import carry_out, on_devices
from wgpu_lora.proof.worker_jobs import by_default
from wgpu_lora.train.options.training_arguments import TrainingArguments

GOOD, WRONG = {"error": 1e-13, "fine": True}, {"error": 0.1, "fine": False}


@pytest.mark.parametrize(
    ("discrete", "changes", "want"),
    [
        (0, {}, "passed"),
        (0, {"computed": {"1": WRONG}}, "failed"),
        (0, {"computed": {"1": WRONG | {"error": None}}}, "failed"),  # it was not finite
        (0, {"used": [0]}, "failed"),
        (0, {"used": [0], "hardware": ["a 0", "a 0"]}, "passed"),
        (0, {"used": [0], "asked": True}, "passed"),
        (0, {"devices": [], "used": [], "hardware": [], "computed": {}}, "failed"),
        (2, {}, "passed"),
        (3, {}, "failed"),
        (2, {"hardware": ["a 0", "a 0"]}, "failed"),  # one, behind two APIs
    ],
)
def test_devices(discrete: int, changes: dict[str, Any], want: str) -> None:
    device = {"index": 0, "name": "a", "driver": "d", "backend": "Vulkan", "kind": "discrete"}
    facts = {"devices": [device, {**device, "index": 1}], "used": [0, 1], "asked": False, "wgpu_native": "0",
             "computed": {"0": GOOD, "1": GOOD}, "hardware": ["a 0", "a 1"]}  # fmt: skip
    proof = Proof(Path("out"), Path("r"), TrainingArguments(), None, SimpleNamespace(), discrete)  # type: ignore[arg-type]
    proof.made["devices"] = facts | changes
    check = carry_out(1, "devices", devices_compute, proof)
    assert "the check itself broke" not in check.reason
    assert check.status == want


SOFTWARE = [{"index": i, "name": name, "kind": "software"} for i, name in enumerate(("llvmpipe", "SwiftShader"))]
REAL = {"index": 0, "name": "H", "kind": "discrete"}
MIXED = {"devices": [REAL, SOFTWARE[1]], "used": [0, 1], "hardware": ["h", "s"]}


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (
            {"devices": SOFTWARE, "used": [0, 1], "hardware": ["l", "s"]},
            "2 software devices (llvmpipe, SwiftShader); no discrete GPU was found",
        ),
        (MIXED, "1 discrete device (H) and 1 software device (SwiftShader)"),
        (MIXED | {"used": [1]}, "1 software device (SwiftShader); no discrete GPU was used"),
        ({"devices": [REAL, REAL | {"index": 1}], "used": [0, 1], "hardware": ["h", "h"]}, "1 discrete device (H)"),
        ({}, ""),
    ],
)
def test_a_verdict_names_what_it_was_proven_on(devices: dict[str, Any], said: str) -> None:
    assert on_devices(devices) == said


CHECKS = [Check(n, "x", "passed", 0.0, "") for n in range(1, 10)]
LEFT = [replace(check, status="not run", reason=LEFT_OUT) for check in CHECKS[2:]]
UNMET = "--require-discrete 1 is not met: 0 discrete GPUs are used"


@pytest.mark.parametrize(
    ("checks", "on", "outcome", "code", "verdict"),
    [
        (CHECKS, ["1 discrete device (H)"], "proven", 0, "without CUDA, on 1 discrete device (H)."),
        (
            [*CHECKS[:2], *LEFT],
            ["1 discrete device (H)"],
            "open",
            0,
            "Partly checked: 2 of 9 checks passed on 1 discrete device (H); left out by --only: 3, 4, 5, 6, 7, 8, 9.",
        ),
        (
            [replace(CHECKS[0], status="failed"), CHECKS[1], *LEFT],
            [],
            "refuted",
            1,
            "Not proven: 1 of 9 checks passed; failed: 1; left out by --only: 3, ",
        ),
        (
            [*CHECKS[:8], replace(CHECKS[8], status="not run", reason="no device")],
            [],
            "open",
            0,
            "Not proven: 8 of 9 checks passed; not run: 9.",
        ),
        (CHECKS, ["1 software device (S)", UNMET], None, 1, f"passed on 1 software device (S); {UNMET}"),
    ],
)
def test_verdicts(checks: list[Check], on: list[str], outcome: str | None, code: int, verdict: str) -> None:
    found = Result(checks, Path(), *on)
    assert verdict in found.verdict
    assert found.code == code
    assert outcome in (None, found.outcome)
    assert found.proven == (outcome == "proven")


def test_as_many_devices_are_used_as_are_asked_for() -> None:
    def device(index: int, kind: str) -> DeviceInfo:
        return DeviceInfo(index, f"GPU {index}", "d", 0, "Vulkan", kind, (), {})

    devices = [*(device(i, "discrete") for i in range(4)), device(4, "software")]
    assert by_default(devices) == [0, 1]
    assert by_default(devices, 3) == [0, 1, 2]
    assert by_default(devices[3:], 3) == [3, 4]
