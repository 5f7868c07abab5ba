"""Reading what drivers' compilers print. The samples are an NF4 product that spills, most lines cut."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.broken import Break
from support.events import hearing

from scripts.bench import gpu_report
from scripts.bench.gpu_report import wrong
from scripts.gpu_compilers import __main__ as command
from scripts.gpu_compilers import gpus
from scripts.gpu_compilers.__main__ import violations
from scripts.gpu_compilers.compiled_shader import (
    Compiled,
    Instruction,
    Loop,
    Unreadable,
    innermost,
    parse_amd,
    parse_apple,
    parse_nvidia,
)
from scripts.gpu_compilers.compiler_report import details, figures, kind_of, nearest, predictions_json, to_json
from scripts.gpu_compilers.compiler_run import MARKER, Answers, Row, ask
from scripts.gpu_compilers.gpus import GPUS, Place
from scripts.gpu_compilers.recorded_kernels import Selection
from tests.support import FIXTURES
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.tiling import Tiling
from wgpu_lora.gpu.tuner import Tuner
from wgpu_lora.gpu.verdicts import Verdicts

CALL = {
    "kernel": "nf4_matmul_backward",
    "constants": {"b_type": "nf4", "form": "nn"},
    "tiling": Tiling("broadcast", 32, 32, 8).to_json(),
    "default": True,
    "used_by": {"qwen2.5-0.5b": ["training"]},
}
SPILLING = {
    "rdna3": ("amd", Compiled(256, 325, 10496, 0, 5, 6291, Loop(33, 3, 3))),
    "ada": ("nvidia", Compiled(255, 340, 276, 0, 8, 8591, Loop(12, 3, 3))),
    "m1": ("apple", Compiled(128, 795, 1012, 0, 384, 10401, Loop(8, 3, 3))),
}


def lines(sample: str) -> list[str]:
    return (FIXTURES / "gpu_compilers" / f"{sample}.txt").read_text().splitlines()


@pytest.mark.parametrize("gpu", SPILLING)
def test_a_spilling_kernel_is_read_and_breaks_the_rule(gpu: str) -> None:
    sample, expected = SPILLING[gpu]
    found = GPUS[gpu].parse(lines(sample))
    assert found == expected
    (sentence,) = violations([Answers(GPUS[gpu], 32, rows=[Row(CALL, found)])])
    assert "nf4_matmul_backward nf4 nn (qwen2.5-0.5b) spills in its default tiling" in sentence
    assert sentence.endswith(f": {expected.spilled}")


@pytest.mark.parametrize("gpu", SPILLING)
def test_without_statistics_nothing_is_read(gpu: str) -> None:
    with pytest.raises(Unreadable):
        GPUS[gpu].parse(["NAK IR after calc_instr_deps:", "Compute Shader:"])


def test_what_the_rule_lets_through() -> None:
    good = Compiled(120, 0, 0, 0, 12, 1278, None)
    answers = Answers(GPUS["rdna3"], 32, rows=[Row(CALL, good)])
    assert violations([answers]) == []
    bad = [replace(good, scratch=64), None]
    answers.rows = [Row({**CALL, "default": False}, one, "the compiler crashed") for one in bad]
    assert [text.rsplit(": ")[-1] for text in violations([answers])] == ["64 bytes of arrays", "the compiler crashed"]
    assert all("the tuner may choose" in text for text in violations([answers]))
    assert len(violations([Answers(GPUS["m1"], 32)])) == 1  # nothing compiled is no proof


def test_the_innermost_loop_with_the_most_multiply_adds() -> None:
    add, fma, wait = Instruction(), Instruction(1), Instruction(scheduling=True)
    code = [add, fma, add, wait, add, fma, fma, add, fma]
    following: list[list[int]] = [[place + 1] for place in range(8)] + [[]]
    following[3] = [4, 1]  # an inner loop, 1 to 3
    following[6] = [4, 7]  # another, 4 to 6
    following[7] = [8, 0]  # the outer one
    assert innermost(code, following) == Loop(3, 2, 2)
    following[7] = [8]
    following[3], following[6] = [4], [7]
    assert innermost(code, following) is None


def test_what_follows_a_loop_may_stand_inside_it() -> None:
    code = [Instruction(), Instruction(), Instruction(1), Instruction(1), Instruction(1)]
    assert innermost(code, [[1], [2, 4], [3], [], [1]]) == Loop(2, 1, 1)


def test_dual_and_packed_instructions_of_amd_do_two() -> None:
    statistics = lines("amd")[-28:]
    dual = "\tv_dual_fmac_f32 v43, s8, v109 :: v_dual_mul_f32 v110, v110, v66 ; c806da08 2b6e856e"
    both = "\tv_dual_fmac_f32 v65, s12, v95 :: v_dual_fmac_f32 v76, s12, v102 ; c800be0c 414ccc0c"
    packed = "\tv_pk_fma_f16 v1, v2, v3, v4   ; 0"
    found = parse_amd(["disasm:", "BB1:", dual, both, packed, "\ts_branch BB1 ; 0", *statistics])
    assert found.loop == Loop(4, 3, 5)


def test_workgroup_memory_is_in_nir_only() -> None:
    assert parse_nvidia(["shared_size: 3108", *lines("nvidia")]).shared == 3108
    assert parse_apple(["shared_size: 3108", *lines("apple")]).shared == 3108


def test_json_and_table() -> None:
    answers = Answers(GPUS["rdna3"], 64, "RX", "Mesa", [Row(CALL, SPILLING["rdna3"][1]), Row(CALL, None, "crashed")])
    (device,) = to_json([answers], {})["devices"]
    assert device["occupancy"] == {"unit": "subgroups of 32 per SIMD", "most": 32}
    assert device["kernels"][0]["loop"] == {"instructions": 33, "multiplying": 3, "multiply_adds": 3, "share": 0.091}
    assert device["kernels"][1]["error"] == "crashed"
    assert details(answers).row_count == 2


def test_a_compiler_that_crashes_is_started_again_behind_the_crash(tmp_path: Path) -> None:
    child = tmp_path / "child.sh"  # its arguments: -m MODULE SUBGROUP_SIZE SELECTION SKIPPED
    child.write_text(
        f"""echo '{MARKER}{{"device": "RX", "driver": "Mesa", "software": false}}'
        if [ "$5" = 0 ]; then echo '{MARKER}{json.dumps({"call": CALL})}'; kill -SEGV $$; fi
        for call in 1 2; do echo '{MARKER}{json.dumps({"call": CALL})}'; cat {FIXTURES}/gpu_compilers/amd.txt; done
        echo '{MARKER}{{"end": true}}'"""
    )
    answers = ask(GPUS["rdna3"], 32, Place(("sh", str(child))), Selection())
    crashed, *others = answers.rows
    assert answers.device == "RX"
    assert crashed.compiled is None
    assert "crashed (exit code -11)" in crashed.error
    assert [row.compiled for row in others] == [SPILLING["rdna3"][1]] * 2
    child.write_text("echo no device; exit 3")
    with pytest.raises(UserError, match=r"nothing was compiled \(exit code 3\):\s+no device"):
        ask(GPUS["rdna3"], 32, Place(("sh", str(child))), Selection())


def test_what_is_missing_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "root.sh"
    script.write_text("#!/bin/sh\necho downloading >&2\necho 'debootstrap is missing: install it.' >&2\nexit 2\n")
    script.chmod(0o755)
    monkeypatch.setattr(gpus, "ROOT_SCRIPT", script)
    assert command.main(["--gpu", "m1", "--root", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "debootstrap is missing: install it."


@pytest.mark.parametrize(
    "wrong",
    [
        ("--tokens", "1"),
        ("--rank", "0"),
        ("--jobs", "0"),
        ("--subgroup-size", "-32"),
        ("--head-dim", "0"),
        ("--head-dim", "7"),
        ("--tiling", "[]"),
        ("--tiling", '{"rows": 0}'),
        ("--tiling", '{"row": 1}'),
        ("--json", "/dev/null/x.json"),
        ("--predictions", "/dev/null/x.json"),
        ("--raw", "/dev/null/x"),
    ],
    ids="=".join,
)
def test_wrong_options_are_refused_before_anything_is_compiled(
    wrong: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "ask_all", lambda *_: pytest.fail("it was compiled"))
    with pytest.raises(SystemExit) as ended:
        command.main([*wrong])
    assert ended.value.code == 2
    assert f"argument {wrong[0]}: " in capsys.readouterr().err


# -- bench-gpu ---------------------------------------------------------------------------------------------------------


def test_the_exit_code_says_that_a_kernel_is_wrong() -> None:
    fine = {"exit_code": 1, "results": [{"kind": "tiling", "right": True}, {"kind": "kernel", "right": None}, {}]}
    assert wrong([fine, {"exit_code": 2, "results": []}]) == 0
    assert wrong([fine, {"exit_code": 1, "results": [{"kind": "kernel", "right": False}]}]) == 1


@pytest.mark.parametrize(
    ("vendor", "name", "gpu"),
    [
        (0x1002, "AMD Radeon RX 5700 XT (RADV NAVI10)", "rdna1"),
        (0x1002, "AMD Radeon RX 6800 (RADV NAVI21)", "rdna1"),
        (0x1002, "AMD Radeon RX 7900 XTX", "rdna3"),
        (0x1002, "AMD Radeon RX 9070 XT", "rdna4"),
        (0x1002, "AMD Radeon Graphics", "rdna3"),
        (0x10DE, "NVIDIA GeForce RTX 4090", "ada"),
        (0x106B, "Apple M2 Pro", "m1"),
        (0x10005, "llvmpipe (LLVM 15.0.6, 256 bits)", None),
    ],
)
def test_the_nearest_gpu(vendor: int, name: str, gpu: str | None) -> None:
    assert kind_of(vendor, name) == gpu


def test_predictions_are_found_by_pipeline() -> None:
    def call(tiling: Tiling, default: bool) -> dict[str, Any]:
        made = {"kernel": "matmul_nt", "constants": {"b_type": "f32"}, "bindings": ["a", "b", "y"]}
        return {**made, "tiling": tiling.to_json(), "default": default}

    used, other = call(Tiling("broadcast", 32, 16, 4, 4), True), call(Tiling(), False)
    answers = [Answers(GPUS["rdna3"], size, "RX 7900 XTX", "RADV") for size in (64, 32)]
    answers[1].rows = [Row(used, Compiled(120, 0, 0, 0, 12, 900, None)), Row(other, None)]
    predicted = json.loads(json.dumps(predictions_json(answers)))
    info = SimpleNamespace(vendor_id=0x1002, name="AMD Radeon RX 7600")
    device: Any = SimpleNamespace(info=info, capabilities=SimpleNamespace(subgroup_size=32))
    found = nearest(device, predicted)
    assert found is not None
    assert (found["gpu"], found["subgroup_size"]) == ("rdna3", 32)
    assert figures(found, [used, other]) == [
        {"registers": 120, "spilled": 0, "occupancy": 12, "instructions": 900},
        None,
    ]
    assert figures(None, [used]) == [None]


@pytest.mark.filterwarnings("ignore::wgpu_lora.errors.DeviceWarning")
@pytest.mark.parametrize(("kernel", "compiles"), [("attention_forward", True), ("rmsnorm_forward", False)])
def test_a_kernel_that_is_wrong_loses_no_other_measurement(
    device: Device, broken: Break, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, compiles: bool
) -> None:
    broken(kernel, compiles=compiles)
    monkeypatch.setattr(device, "verdicts", Verdicts(device, tmp_path))
    monkeypatch.setattr(gpu_report, "Device", lambda _: device)
    monkeypatch.setattr(gpu_report, "Tuner", partial(Tuner, seconds=0.0, directory=tmp_path))
    records: list[dict[str, Any]] = []
    job = {"shape": "tiny-qwen3", "tokens": 16, "rounds": 1, "candidates": False}
    ended = gpu_report.kernels(hearing(measured=records.append), where="the job", **job)  # type: ignore[arg-type]
    assert (ended.code, set(ended.result["wrong"])) == (1, {kernel})
    assert kernel in ended.reason
    kinds = {record["kind"] for record in records}
    assert "tiling" in kinds
    if compiles:  # a step can be taken
        assert {"kernel", "time", "tuning"} <= kinds
        right = {record["kernel"] for record in records if record["kind"] == "kernel" and record["right"]}
        assert {"rmsnorm_forward", "nf4_matmul"} <= right
    else:
        assert [record["reason"] for record in records if record["kind"] == "kernel"] == ["register allocation failed"]
