"""What a proof says of the devices that it was done on, and how many real GPUs it wants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from wgpu_lora.gpu.device_list import DeviceInfo
from wgpu_lora.proof.checks import devices_compute
from wgpu_lora.proof.proof_context import LEFT_OUT, Check, Proof, Result
from wgpu_lora.proof.proof_run import carry_out, on_devices
from wgpu_lora.proof.worker_jobs import by_default
from wgpu_lora.train.options.training_arguments import TrainingArguments


def test_devices() -> None:
    def found(discrete: int = 0, **changes: Any) -> str:
        device = {"index": 0, "name": "a", "driver": "d", "backend": "Vulkan", "kind": "discrete"}
        good = {"error": 1e-13, "fine": True}
        facts = {"devices": [device, {**device, "index": 1}], "used": [0, 1], "asked": False,
                 "computed": {"0": good, "1": good}, "wgpu_native": "0", "hardware": ["a 0", "a 1"]}  # fmt: skip
        check = carry_out(1, "devices", devices_compute, proof_of(facts | changes, discrete))
        assert "the check itself broke" not in check.reason
        return check.status

    assert found() == "passed"
    assert found(computed={"1": {"error": 0.1, "fine": False}}) == "failed"
    assert found(computed={"1": {"error": None, "fine": False}}) == "failed"  # it was not finite
    assert found(used=[0]) == "failed"
    assert found(used=[0], hardware=["a 0", "a 0"]) == "passed"
    assert found(used=[0], asked=True) == "passed"
    assert found(devices=[], used=[], hardware=[], computed={}) == "failed"
    assert found(discrete=2) == "passed"
    assert found(discrete=3) == "failed"
    assert found(discrete=2, hardware=["a 0", "a 0"]) == "failed"  # one, behind two APIs


def proof_of(devices: dict[str, Any], discrete: int) -> Proof:
    made = Proof(Path("out"), Path("r"), TrainingArguments(), None, SimpleNamespace(), discrete)  # type: ignore[arg-type]
    made.made["devices"] = devices
    return made


def test_a_verdict_names_what_it_was_proven_on() -> None:
    def device(index: int, kind: str, name: str) -> dict[str, Any]:
        return {"index": index, "name": name, "kind": kind}

    software = [device(0, "software", "llvmpipe"), device(1, "software", "SwiftShader")]
    both = {"devices": software, "used": [0, 1], "hardware": ["l", "s"]}
    assert on_devices(both) == "2 software devices (llvmpipe, SwiftShader); no discrete GPU was found"
    mixed = {"devices": [device(0, "discrete", "H"), *software[1:]], "used": [0, 1], "hardware": ["h", "s"]}
    assert on_devices(mixed) == "1 discrete device (H) and 1 software device (SwiftShader)"
    assert on_devices(mixed | {"used": [1]}).endswith("; no discrete GPU was used")
    twice = {"devices": [device(i, "discrete", "H") for i in (0, 1)], "used": [0, 1], "hardware": ["h", "h"]}
    assert on_devices(twice) == "1 discrete device (H)"
    assert on_devices({}) == ""
    checks = [Check(n, "x", "passed", 0.0, "") for n in range(1, 10)]
    assert Result(checks, Path(), "1 discrete device (H)").verdict.endswith("without CUDA, on 1 discrete device (H).")
    left = [replace(check, status="not run", reason=LEFT_OUT) for check in checks[2:]]
    partly = Result([*checks[:2], *left], Path(), "1 discrete device (H)")
    assert (partly.outcome, partly.code) == ("open", 0)
    assert partly.verdict == (
        "Partly checked: 2 of 9 checks passed on 1 discrete device (H); left out by --only: 3, 4, 5, 6, 7, 8, 9."
    )
    failed = Result([replace(checks[0], status="failed"), checks[1], *left], Path())
    assert (failed.outcome, failed.code) == ("refuted", 1)
    assert failed.verdict.startswith("Not proven: 1 of 9 checks passed; failed: 1; left out by --only: 3, ")
    unable = Result([*checks[:8], replace(checks[8], status="not run", reason="no device")], Path())
    assert (unable.outcome, unable.verdict) == ("open", "Not proven: 8 of 9 checks passed; not run: 9.")
    short = Result(checks, Path(), "1 software device (S)", "--require-discrete 1 is not met: 0 discrete GPUs are used")
    assert (short.proven, short.code) == (False, 1)
    assert "passed on 1 software device (S); --require-discrete 1 is not met" in short.verdict


def test_as_many_devices_are_used_as_are_asked_for() -> None:
    def device(index: int, kind: str) -> DeviceInfo:
        return DeviceInfo(index, f"GPU {index}", "d", 0, "Vulkan", kind, (), {})

    devices = [*(device(i, "discrete") for i in range(4)), device(4, "software")]
    assert by_default(devices) == [0, 1]
    assert by_default(devices, 3) == [0, 1, 2]
    assert by_default(devices[3:], 3) == [3, 4]
