"""Each check of a proof on made-up findings: what makes it fail, and the verdict on all of them."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from wgpu_lora.cli.proof.checks import (
    answers_pass_their_checks,
    devices_agree,
    devices_compute,
    gradients_agree,
    losses_fall,
    training_and_evaluation,
    work_happened_on_the_device,
)
from wgpu_lora.cli.proof.proof_context import (
    LEFT_OUT,
    Check,
    Evaluated,
    Proof,
    Result,
    Training,
    carry_out,
    evaluations,
    on_devices,
)
from wgpu_lora.cli.proof.proof_run import NO_DEVICES, loss_chart
from wgpu_lora.cli.proof.worker_jobs import default_devices, difference
from wgpu_lora.cluster.worker.worker import Worker
from wgpu_lora.files.json_files import to_json
from wgpu_lora.gpu.device_list import DeviceInfo
from wgpu_lora.train.checks.code_check import CheckResult
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run.records import UsedDevice
from wgpu_lora.train.run.training_log import Log, read_log


def status(check: Any, **proof: Any) -> str:
    namespace: Any = SimpleNamespace(**proof)
    result = carry_out(0, "", check, namespace)
    assert "the check itself broke" not in result.reason
    return result.status


def generated(out: Path, index: int, ids: list[int], shift: float = 0.0, gap: float = 1.0) -> dict[str, Any]:
    logits = np.linspace(-10, 10, 40, dtype=np.float32).reshape(4, 10) + np.float32(shift)
    (out / "work").mkdir(exist_ok=True)
    np.savez(out / "work" / f"logits-{index}.npz", logits)
    return {"matrices": 7, "packed_matrices": 7, "answers": [{"ids": ids, "gaps": [gap] * len(ids)}]}


def agreeing(out: Path, answers: list[dict[str, Any]], used: tuple[int, ...] = (0, 1)) -> str:
    def start(name: str, job: str, device: int, **options: Any) -> Any:
        return SimpleNamespace(result=lambda: answers[device])

    children = SimpleNamespace(start=start)
    args = TrainingArguments(model="m")
    return status(devices_agree, out=out, args=args, device_indices=lambda: used, children=children)


@pytest.mark.parametrize(
    ("other", "want"),
    [
        ({"ids": [1, 2, 3, 4]}, "passed"),
        ({"ids": [1, 2, 3, 4], "shift": 1e-3}, "passed"),
        ({"ids": [1, 2, 3, 4], "shift": 0.1}, "failed"),
        ({"ids": [1, 2, 3, 4], "shift": math.nan}, "failed"),
        ({"ids": [1, 2, 9, 4]}, "failed"),
        ({"ids": [1, 2]}, "failed"),
        ({"ids": []}, "failed"),
    ],
)
def test_generation(tmp_path: Path, other: dict[str, Any], want: str) -> None:
    answers = [generated(tmp_path, 0, [1, 2, 3, 4]), generated(tmp_path, 1, **other)]
    assert agreeing(tmp_path, answers) == want
    assert agreeing(tmp_path, answers, (0,)) == "not run"
    answers[1]["packed_matrices"] = 6
    assert agreeing(tmp_path, answers) == "failed"
    assert agreeing(tmp_path, answers[::-1], (0,)) == "failed"


def test_answers_may_differ_after_a_near_tie(tmp_path: Path) -> None:
    answers = [generated(tmp_path, 0, [1, 2, 3], gap=1e-3), generated(tmp_path, 1, [1, 2, 4], gap=1e-3)]
    assert agreeing(tmp_path, answers) == "passed"


DEVICE = {"name": "a", "driver": "d", "backend": "Vulkan"}
EVALUATED = {"loss": 1.0, "device": DEVICE}


def training(losses: list[float], heldout: float = 0.5, **changes: Any) -> Training:
    log = [{"step": i, "loss": loss, "grad_norm": 1.0, "seconds": float(i)} for i, loss in enumerate(losses, 1)]
    log[-1]["eval_loss"] = heldout
    used = UsedDevice("a", "d", "Vulkan", "discrete", 32, False)
    state = SimpleNamespace(step=len(losses), seconds=1.0)
    record = SimpleNamespace(stop_reason="max steps", environment=SimpleNamespace(device=used), state=state)
    evaluations = [Evaluated(EVALUATED, 3)]
    values = {
        "code": 0,
        "reason": "it ended",
        "evaluations": evaluations,
        "devices": [0, 1],
        "record": record,
    } | changes
    return Training(**{"directory": Path("run"), "before": EVALUATED, "log": log} | values)


def evaluated(steps: int = 3, **changes: Any) -> list[Evaluated]:
    return [Evaluated(EVALUATED | changes, steps)]


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, "passed"),
        ({"code": 1}, "failed"),
        ({"evaluations": [Evaluated({}, 0, "evaluate ended with exit code 2: no")]}, "failed"),
        ({"evaluations": []}, "failed"),
        ({"evaluations": evaluated(0)}, "not run"),
        ({"evaluations": evaluated(0), "devices": [0]}, "passed"),
        ({"evaluations": evaluated(0), "code": 1}, "failed"),
        ({"evaluations": evaluated(loss=1.0005)}, "passed"),
        ({"evaluations": evaluated(loss=1.002)}, "failed"),
        ({"evaluations": evaluated(loss=math.nan)}, "failed"),
        ({"evaluations": evaluated(loss=None)}, "failed"),
        *(({"evaluations": evaluated(device=DEVICE | {fact: "another"})}, "failed") for fact in DEVICE),
    ],
)
def test_training_beside_evaluating(changes: dict[str, Any], want: str) -> None:
    run = training([1.0] * 20, **changes)
    assert status(training_and_evaluation, training=run, devices={"devices": [DEVICE] * 2}) == want


STEPS = """
import json, time
for _ in range(12):
    time.sleep(0.1)
    print(json.dumps({"event": "step", "time": time.time()}), flush=True)
"""
EVALUATE = """
import json, sys, time
for _ in sys.stdin:
    time.sleep(float(sys.argv[1]))
    print(json.dumps({"event": "answer", "loss": 1.0, "seconds": float(sys.argv[2])}), flush=True)
"""


def test_evaluations_go_on_until_one_computes_during_steps(tmp_path: Path) -> None:
    """Stand-ins for the jobs: a step every tenth of a second, and evaluations that compute for part of their time."""

    def records(*evaluate: str) -> list[Evaluated]:
        def start(name: str, *code: str) -> Worker:
            return Worker(
                "stub", {}, name=name, program=[sys.executable, "-c", *code], directory=tmp_path, interactive=True
            )

        with start("finetune", STEPS) as finetune, start("evaluate", *evaluate) as evaluating:
            return list(evaluations(evaluating, finetune))

    (record,) = records(EVALUATE, "0.5", "0.5")
    assert 3 <= record.steps <= 6
    without = records(EVALUATE, "0.1", "0")
    assert len(without) > 1
    assert not any(item.steps for item in without)
    (failed,) = records("import sys; sys.exit(3)")
    assert failed.failed == "evaluate ended with exit code 3: no message"


FALLING = list(np.linspace(2, 1, 40))
DIVERGED = SimpleNamespace(stop_reason="non-finite", state=SimpleNamespace(step=40))


@pytest.mark.parametrize(
    ("losses", "changes", "overlap", "want"),
    [
        (FALLING, {}, 0, "passed"),
        (FALLING, {"heldout": 0.99}, 0, "failed"),
        (FALLING, {}, 1, "not run"),
        (FALLING, {"heldout": 0.99}, 1, "failed"),
        (FALLING, {"heldout": math.nan}, 0, "failed"),
        (FALLING[::-1], {}, 0, "failed"),
        ([2.0, *[1.97] * 39], {}, 0, "failed"),
        ([1.3, 0.7] * 18 + [1.2, 0.5] * 2, {}, 0, "failed"),  # within the scatter
        (FALLING[:19], {}, 0, "not run"),
        (FALLING, {"record": DIVERGED, "code": 1}, 0, "failed"),
        (FALLING, {"record": None, "code": 1}, 0, "not run"),
    ],
)
def test_losses(losses: list[float], changes: dict[str, Any], overlap: int, want: str) -> None:
    assert status(losses_fall, training=training(losses, **changes), leaked_rows=(overlap, 8)) == want


@pytest.mark.parametrize("key", ["loss", "grad_norm"])
def test_a_log_without_a_finite_number_for_every_step_fails(tmp_path: Path, key: str) -> None:
    run = training(list(np.linspace(2, 1, 40)))
    run.log[20][key] = math.nan
    log = Log(tmp_path / "log.jsonl")
    for line in run.log:
        log.write(line | {"epoch": 0.0})
    run.log = read_log(log.path)
    assert status(losses_fall, training=run, leaked_rows=(0, 8)) == "failed"


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, "passed"),
        ({"clock": "host"}, "passed"),
        ({"driver": "another"}, "failed"),
        ({"loss": 2.001}, "failed"),
        ({"loss": None}, "failed"),  # it was not finite
        ({"device_seconds": 0.001}, "passed"),  # a fast GPU, a tiny model
        ({"device_seconds": 0.0}, "failed"),
        ({"device_seconds": 1.1}, "failed"),
        ({"dispatches": 0}, "failed"),
    ],
)
def test_backend(changes: dict[str, Any], want: str) -> None:
    clock = {"clock": "timestamps", "dispatches": 9, "device_seconds": 0.9, "host_seconds": 1.0, "loss": 2.0}
    listed = {"name": "a", "backend": "Vulkan", "kind": "discrete", "driver": changes.get("driver", "d")}
    step = {"clock": clock | changes}
    proof = {"trained": lambda: training([2.0] * 20), "devices": {"devices": [listed]}, "step": step}
    assert status(work_happened_on_the_device, **proof) == want


@pytest.mark.parametrize(
    ("measured", "gradient", "want"),
    [
        ([1e-3, -2e-4], [1.001e-3, -2e-4], "passed"),
        ([1e-3, -2e-4], [1e-3, 2e-4], "failed"),
        ([1e-3, -2e-4], [1.05e-3, -2e-4], "failed"),
        ([1e-3, 5e-5], [1e-3, 0.0], "failed"),
        ([1e-3, math.nan], [1e-3, 1e-3], "failed"),
        ([1e-3, 1e-3], [1e-3, None], "failed"),
        ([0.0, 0.0], [0.0, 0.0], "failed"),
        ([1e-3] * 4 + [None], [1e-3] * 5, "passed"),
        ([1e-3] * 2 + [None], [1e-3] * 3, "failed"),
        ([1e-3] * 4 + [math.nan], [1e-3] * 5, "failed"),
    ],
)
def test_gradients(measured: list[float | None], gradient: list[float | None], want: str) -> None:
    rows = [
        {"matrix": "q.A", "length": None if m is None else 0.1, "measured": m, "gradient": g}
        for m, g in zip(measured, gradient, strict=True)
    ]
    gradients = json.loads(to_json({"loss": 1.0, "rounding": 2e-6, "directions": rows}))
    assert status(gradients_agree, args=SimpleNamespace(compute_dtype="f32"), step={"gradients": gradients}) == want
    assert status(gradients_agree, args=SimpleNamespace(compute_dtype="bf16")) == "not run"


def test_a_loss_that_is_not_finite_is_not_taken_for_a_curved_one() -> None:
    straight = difference(lambda by: 2.0 + 3.0 * by, 6.0, 2.0)
    assert straight["measured"] == pytest.approx(straight["gradient"])
    curved = difference(lambda by: 2.0 + np.sign(by), 6.0, 2.0)
    assert curved["length"] is curved["measured"] is None
    broken = difference(lambda by: math.nan if by < 0 else 2.0, 6.0, 2.0)
    assert broken["length"]
    assert math.isnan(broken["measured"])


MESSAGES = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "f"}]
CHECKED: list[dict[str, Any]] = [{"messages": MESSAGES, "check": "assert f()"}] * 10


@pytest.mark.parametrize(
    ("rows", "before", "after", "overlap", "want"),
    [
        (CHECKED, 0, 9, 0, "passed"),
        (CHECKED, 3, 3, 0, "failed"),
        (CHECKED, 4, 3, 0, "failed"),
        ([{"messages": MESSAGES}] * 10, 0, 9, 0, "not run"),
        (CHECKED, 0, 9, 1, "not run"),
        ([*CHECKED[1:], {"text": "? f", "check": "assert f()"}], 0, 9, 0, "not run"),
        ([*CHECKED[1:], CHECKED[0] | {"tools": [{"type": "function", "function": {"name": "f"}}]}], 0, 9, 0, "not run"),
    ],
)
def test_answers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: list[dict[str, Any]],
    before: int,
    after: int,
    overlap: int,
    want: str,
) -> None:
    file = tmp_path / "heldout.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(name: str, job: str, prompts: list[Any], adapters: list[str | None], **options: Any) -> list[list[str]]:
        assert prompts == [[{"role": "user", "content": "?"}]] * 10
        assert adapters == [None, "run"]
        return [["right" if i < passing else "wrong" for i in range(10)] for passing in (before, after)]

    def run_check(text: str, check: str, allow_unconfined: bool) -> CheckResult:
        return CheckResult("passed" if text == "right" else "failed", "", True)

    monkeypatch.setattr("wgpu_lora.cli.proof.checks.run_check", run_check)
    proof = {"args": TrainingArguments(eval_data=str(file)), "leaked_rows": (overlap, 10), "allow_unconfined": False}
    proof |= {
        "device_indices": lambda: [0],
        "trained": lambda: training([1.0] * 20),
        "children": SimpleNamespace(run=run),
    }
    assert status(answers_pass_their_checks, **proof) == want


def test_the_loss_chart_leaves_out_missing_values() -> None:
    train, heldout = loss_chart([2.0, None, 1.0], [(0, 2.2), (3, None)]).lines
    assert train.path.count("L") == 1
    assert [label for _, _, label in heldout.dots] == ["held out: 2.2 (optimizer step 0)"]
    assert loss_chart([0.0], []).lines[0].dots


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
        (0, NO_DEVICES | {"error": "devices ended with exit code 1: no message"}, "failed"),
        (2, {}, "passed"),
        (3, {}, "failed"),
        (2, {"hardware": ["a 0", "a 0"]}, "failed"),  # one, behind two APIs
    ],
)
def test_devices(discrete: int, changes: dict[str, Any], want: str) -> None:
    device = {"index": 0, "name": "a", "driver": "d", "backend": "Vulkan", "kind": "discrete"}
    facts = {"devices": [device, {**device, "index": 1}], "used": [0, 1], "asked": False, "webgpu": {},
             "computed": {"0": GOOD, "1": GOOD}, "hardware": ["a 0", "a 1"]}  # fmt: skip
    children: Any = SimpleNamespace()
    proof = Proof(Path("out"), Path("r"), TrainingArguments(), facts | changes, children, discrete)
    check = carry_out(1, "devices", devices_compute, proof)
    assert "the check itself broke" not in check.reason
    assert check.status == want


SOFTWARE = [{"index": i, "name": name, "kind": "software"} for i, name in enumerate(("llvmpipe", "SwiftShader"))]
REAL = {"index": 0, "name": "H", "kind": "discrete"}
MIXED = {"devices": [REAL, SOFTWARE[1]], "used": [0, 1], "hardware": ["h", "s"]}


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        (
            {"devices": SOFTWARE, "used": [0, 1], "hardware": ["l", "s"]},
            "2 software devices (llvmpipe, SwiftShader); no discrete GPU was found",
        ),
        (MIXED, "1 discrete device (H) and 1 software device (SwiftShader)"),
        (MIXED | {"used": [1]}, "1 software device (SwiftShader); no discrete GPU was used"),
        ({"devices": [REAL, REAL | {"index": 1}], "used": [0, 1], "hardware": ["h", "h"]}, "1 discrete device (H)"),
        (NO_DEVICES, ""),
    ],
)
def test_a_verdict_names_what_it_was_proven_on(devices: dict[str, Any], text: str) -> None:
    assert on_devices(devices) == text


CHECKS = [Check(n, "x", "passed", 0.0, "") for n in range(1, 10)]
LEFT = [replace(check, status="not run", reason=LEFT_OUT) for check in CHECKS[2:]]


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
    ],
)
def test_verdicts(checks: list[Check], on: list[str], outcome: str, code: int, verdict: str) -> None:
    result = Result(checks, Path(), *on)
    assert verdict in result.verdict
    assert result.code == code
    assert result.outcome == outcome


def test_as_many_devices_are_used_as_are_asked_for() -> None:
    def device(index: int, kind: str) -> DeviceInfo:
        return DeviceInfo(index, f"GPU {index}", "d", 0, "Vulkan", kind, (), {})

    devices = [*(device(i, "discrete") for i in range(4)), device(4, "software")]
    assert default_devices(devices) == [0, 1]
    assert default_devices(devices, 3) == [0, 1, 2]
    assert default_devices(devices[3:], 3) == [3, 4]
