"""Reading what drivers' compilers print. The samples are an NF4 product that spills, most lines cut."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from support.events import hearing
from support.processes.broken import Break

from scripts.bench import gpu_report
from scripts.bench.gpu_report import wrong
from scripts.gpu_compilers import __main__ as command
from scripts.gpu_compilers import gpus
from scripts.gpu_compilers.__main__ import violations
from scripts.gpu_compilers.compiled_shader import (
    Compiled,
    Instruction,
    Kind,
    Loop,
    Unreadable,
    innermost,
    parse_amd,
    parse_apple,
    parse_nvidia,
)
from scripts.gpu_compilers.compiler_report import (
    best_first,
    bounds,
    details,
    figures,
    kind_of,
    losses,
    nearest,
    predictions_json,
    to_json,
)
from scripts.gpu_compilers.compiler_run import MARKER, Answers, Row, ask
from scripts.gpu_compilers.gpus import GPUS, Environment
from scripts.gpu_compilers.port_model import ADA, M1, RDNA1, RDNA3, RDNA4, Rates, bound
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
    "bindings": ["a", "codes", "y"],
    "tiling": Tiling("broadcast", 32, 32, 8).to_json(),
    "default": True,
    "used_by": {"qwen2.5-0.5b": ["training"]},
}
NONE: dict[str, Any] = {"devices": []}  # predictions
F, WAIT, INTEGER, GLOBAL, SCALAR = Kind.MULTIPLY_ADD, Kind.WAIT, Kind.INTEGER, Kind.GLOBAL, Kind.SCALAR
LOOPS = {
    "rdna3": {SCALAR: 13, GLOBAL: 14, Kind.FLOAT: 2, F: 3, INTEGER: 1, WAIT: 8},
    "ada": {SCALAR: 5, WAIT: 1, GLOBAL: 4, F: 3},
    "m1": {SCALAR: 5, F: 3},
}
SPILLING = {
    "rdna3": ("amd", Compiled(256, 325, 10496, 0, 5, 6291, Loop(33, 3, 3, LOOPS["rdna3"]))),
    "ada": ("nvidia", Compiled(255, 340, 276, 0, 8, 8591, Loop(12, 3, 3, LOOPS["ada"]))),
    "m1": ("apple", Compiled(128, 795, 1012, 0, 384, 10401, Loop(8, 3, 3, LOOPS["m1"]))),
}


def lines(sample: str) -> list[str]:
    return (FIXTURES / "gpu_compilers" / f"{sample}.txt").read_text().splitlines()


@pytest.mark.parametrize("gpu", SPILLING)
def test_a_spilling_kernel_is_read_and_breaks_the_rule(gpu: str) -> None:
    sample, expected = SPILLING[gpu]
    answer = GPUS[gpu].parse(lines(sample))
    assert answer == expected
    (sentence,) = violations([Answers(GPUS[gpu], 32, rows=[Row(CALL, answer)])], NONE)
    assert "nf4_matmul_backward nf4 nn (qwen2.5-0.5b) spills in its default tiling" in sentence
    assert sentence.endswith(f": {expected.spilled}")


@pytest.mark.parametrize("gpu", SPILLING)
def test_without_statistics_nothing_is_read(gpu: str) -> None:
    with pytest.raises(Unreadable):
        GPUS[gpu].parse(["NAK IR after calc_instr_deps:", "Compute Shader:"])


def test_what_the_rule_lets_through() -> None:
    good = Compiled(120, 0, 0, 0, 12, 1278, None)
    answers = Answers(GPUS["rdna3"], 32, rows=[Row(CALL, good)])
    assert violations([answers], NONE) == []
    bad = [replace(good, scratch=64), None]
    answers.rows = [Row({**CALL, "default": False}, answer, "the compiler crashed") for answer in bad]
    assert [text.rsplit(": ")[-1] for text in violations([answers], NONE)] == [
        "64 bytes of arrays",
        "the compiler crashed",
    ]
    assert all("the tuner may choose" in text for text in violations([answers], NONE))
    assert len(violations([Answers(GPUS["m1"], 32)], NONE)) == 1  # nothing compiled is no proof


def test_the_innermost_loop_with_the_most_multiply_adds() -> None:
    add, fma, wait = Instruction(), Instruction(F, 1), Instruction(WAIT)
    code = [add, fma, add, wait, add, fma, fma, add, fma]
    following: list[list[int]] = [[place + 1] for place in range(8)] + [[]]
    following[3] = [4, 1]  # an inner loop, 1 to 3
    following[6] = [4, 7]  # another, 4 to 6
    following[7] = [8, 0]  # the outer one
    assert innermost(code, following) == Loop(3, 2, 2, {INTEGER: 1, F: 2})
    following[7] = [8]
    following[3], following[6] = [4], [7]
    assert innermost(code, following) is None


def test_what_follows_a_loop_may_stand_inside_it() -> None:
    code = [Instruction(), Instruction(), Instruction(F, 1), Instruction(F, 1), Instruction(F, 1)]
    assert innermost(code, [[1], [2, 4], [3], [], [1]]) == Loop(2, 1, 1, {INTEGER: 1, F: 1})


def test_a_loop_whose_test_stands_at_its_end_is_not_the_one_around_it() -> None:
    code = [Instruction(), Instruction(), Instruction(F, 1), Instruction(F, 1), Instruction(SCALAR), Instruction()]
    padding = Instruction(WAIT)
    rotated = [[1], [5], [3], [4], [5], [3, 6], [0]]  # 3 to 5 is entered at 5; 2 is never run
    assert innermost([*code[:2], padding, *code[2:]], rotated) == Loop(3, 2, 2, {F: 2, SCALAR: 1})


def test_dual_and_packed_instructions_of_amd_do_two() -> None:
    statistics = lines("amd")[-28:]
    dual = "\tv_dual_fmac_f32 v43, s8, v109 :: v_dual_mul_f32 v110, v110, v66 ; c806da08 2b6e856e"
    dual_pair = "\tv_dual_fmac_f32 v65, s12, v95 :: v_dual_fmac_f32 v76, s12, v102 ; c800be0c 414ccc0c"
    packed = "\tv_pk_fma_f16 v1, v2, v3, v4   ; 0"
    answer = parse_amd(["disasm:", "BB1:", dual, dual_pair, packed, "\ts_branch BB1 ; 0", *statistics])
    assert answer.loop == Loop(4, 3, 5, {F: 3, SCALAR: 1})


def test_workgroup_memory_is_in_nir_only() -> None:
    assert parse_nvidia(["shared_size: 3108", *lines("nvidia")]).shared == 3108
    assert parse_apple(["shared_size: 3108", *lines("apple")]).shared == 3108


def test_json_and_table() -> None:
    answers = Answers(GPUS["rdna3"], 64, "RX", "Mesa", [Row(CALL, SPILLING["rdna3"][1]), Row(CALL, None, "crashed")])
    (device,) = to_json([answers], {})["devices"]
    assert device["occupancy"] == {"unit": "subgroups of 32 per SIMD", "most": 32}
    loop = device["kernels"][0]["loop"]
    assert (loop["instructions"], loop["multiplying"], loop["multiply_adds"], loop["share"]) == (33, 3, 3, 0.091)
    assert loop["counts"] == LOOPS["rdna3"]
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
    answers = ask(GPUS["rdna3"], 32, Environment(("sh", str(child))), Selection())
    crashed, *remaining = answers.rows
    assert answers.device == "RX"
    assert crashed.compiled is None
    assert "crashed (exit code -11)" in crashed.error
    assert [row.compiled for row in remaining] == [SPILLING["rdna3"][1]] * 2
    child.write_text("echo no device; exit 3")
    with pytest.raises(UserError, match=r"nothing was compiled \(exit code 3\):\s+no device"):
        ask(GPUS["rdna3"], 32, Environment(("sh", str(child))), Selection())


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


# -- the port model ----------------------------------------------------------------------------------------------------

DUAL = "v_dual_fmac_f32 v1, v2, v3 :: v_dual_fmac_f32 v4, v5, v6"


def amd_loop(**counts: int) -> Loop:
    """A loop of instructions by name, each so many times."""
    body = [f"\t{DUAL if name == 'DUAL' else name} v1, v2 ; 0" for name, count in counts.items() for _ in range(count)]
    loop = parse_amd(["disasm:", "BB1:", *body, "\ts_cbranch_scc1 BB1 ; 0", *lines("amd")[-28:]]).loop
    assert loop
    return loop


STATISTICS = lines("nvidia")[lines("nvidia").index("Stage: compute") :]


def nvidia_loop(**counts: int) -> Loop:
    names = [name.replace("_", ".") for name, count in counts.items() for _ in range(count)]
    body = ["block 1 L0 [0, 1] -> {", *(f"      r1 = {name} r2 r3 r4 // delay=1" for name in names), "} -> [1, 2]"]
    loop = parse_nvidia(["NAK IR", "block 0 L1 [] -> {", "} -> [1]", *body, *STATISTICS]).loop
    assert loop
    return loop


def apple_loop(**counts: int) -> Loop:
    names = [name for name, count in counts.items() for _ in range(count)]
    code = [f" {4 * place:x}: 00 {name} r1_r2_r3_r4, r1l, 0, i32, xyzw" for place, name in enumerate(names)]
    code += [f" {4 * len(names):x}: 00 jmp_any {-4 * len(names)}", f" {4 * len(names) + 4:x}: 88 stop"]
    loop = parse_apple([*code, lines("apple")[-1]]).loop
    assert loop
    return loop


def bounded(loop: Loop, rates: Rates) -> tuple[float, str]:
    limit = bound(loop, rates)
    assert limit
    return limit.share, limit.port


# What the compilers made of the NF4 product of 16 rows and 4 columns, for Qwen2.5-7B's shape.
NF4_RDNA3 = {
    "DUAL": 253,
    "v_fmac_f32_e32": 6,
    "v_readlane_b32": 128,
    "v_bfe_u32": 90,
    "v_mul_lo_u32": 5,
    "ds_bpermute_b32": 32,
}
NF4_ADA = {"ffma_ftz": 512, "fmul_ftz": 32, "shfl_idx": 160, "lop3": 119, "ld_global_b32": 12, "ldc_b32": 5}


def test_bounds_of_the_nf4_product_are_those_first_found() -> None:
    assert bounded(amd_loop(**NF4_RDNA3), RDNA3) == (pytest.approx(0.47, abs=0.05), "VALU")
    assert bounded(nvidia_loop(**NF4_ADA), ADA) == (pytest.approx(0.63, abs=0.05), "issue")


def test_the_bound_is_above_what_others_measured() -> None:
    # github.com/seb-v/fp32_sgemm_amd: 49.05 TFLOPS on a 7900 XTX, whose peak is 61.4.
    share, port = bounded(amd_loop(DUAL=64, ds_load_b64=12, v_add_nc_u32_e32=2), RDNA3)
    assert 49.05 / 61.4 < share < 1
    assert port == "VALU"
    share, port = bounded(amd_loop(DUAL=32, ds_load_b128=6), RDNA3)  # 8 x 8 outputs of a lane would need 4
    assert (share, port) == (pytest.approx(32 / 48), "LDS")


def test_matrix_units() -> None:
    amd = amd_loop(v_wmma_f32_16x16x16_f16=16, v_perm_b32=38, ds_load_b64=32)
    assert amd.multiply_adds == 16 * 16**3 // 32
    assert bounded(amd, RDNA3) == (pytest.approx(512 / 550), "VALU")
    assert bounded(amd, RDNA4) == (pytest.approx(256 / 294), "VALU")
    half = amd_loop(v_wmma_f16_16x16x16_f16=16, ds_load_b128=80)
    assert bounded(half, RDNA4) == (pytest.approx(256 / 640), "LDS")
    limit = bound(amd, RDNA3)
    assert limit
    assert limit.speed == pytest.approx(amd.multiply_adds / 550)
    nvidia = nvidia_loop(hmma_m16n8k16_f32=16, ld_shared_strong_cta_b128=8, iadd3=20)
    assert nvidia.multiply_adds == 16 * 2048 // 32
    assert bounded(nvidia, ADA) == (1, "tensor")
    assert bounded(nvidia_loop(hmma_m16n8k16_f16=16, ldsm_x4=20), ADA) == (pytest.approx(256 / 320), "MIO")


@pytest.mark.parametrize(
    ("gpu", "kind", "tera"),
    [
        ("rdna1", None, 9.75),  # RX 5700 XT
        ("rdna3", None, 61.4),  # RX 7900 XTX
        ("rdna3", Kind.MATRIX, 122.8),
        ("rdna4", None, 48.7),  # RX 9070 XT
        ("rdna4", Kind.MATRIX, 195),
        ("ada", None, 82.6),  # RTX 4090
        ("ada", Kind.MATRIX, 165.2),
        ("ada", Kind.MATRIX_F16, 330.3),
        ("m1", None, 2.6),
    ],
)
def test_peaks_are_those_of_the_vendors(gpu: str, kind: Kind | None, tera: float) -> None:
    of = GPUS[gpu]
    per_cycle = 512 / max(of.rates.costs[kind].values()) if kind else 32 * of.rates.peak
    assert 2 * per_cycle * of.units * of.hertz / 1e12 == pytest.approx(tera, rel=0.01)


def test_a_subgroup_of_64_takes_twice_as_long_unless_both_halves_run_at_once() -> None:
    text = {"v_fmac_f32_e32": 32, "v_mul_f32_e32": 8, "v_readlane_b32": 8, "v_bfe_u32": 8}
    narrow, wide = amd_loop(**text), amd_loop(**text, s_and_saveexec_b64=1)
    assert (narrow.lanes, wide.lanes) == (32, 64)
    assert bounded(narrow, RDNA3)[0] == pytest.approx(16 / 56)
    assert bounded(wide, RDNA3)[0] == pytest.approx(32 / 64)
    assert bounded(wide, RDNA1)[0] == pytest.approx(64 / (64 + 16 + 8 + 16))


def test_memory_is_counted_in_words() -> None:
    loop = amd_loop(
        v_fmac_f32_e32=1, ds_load_2addr_stride64_b64=1, ds_read2_b32=1, ds_store_b16=1, buffer_load_dwordx4=1
    )
    assert (loop.counts[Kind.WORKGROUP], loop.counts[GLOBAL]) == (4 + 2 + 1, 4)
    assert amd_loop(v_fmac_f32_e32=1, global_load_b96=2).counts[GLOBAL] == 6
    loop = nvidia_loop(ffma_ftz=1, st_shared_strong_cta_b128=1, ld_global_a64_constant_b32=1)
    assert (loop.counts[Kind.WORKGROUP], loop.counts[GLOBAL]) == (4, 1)
    loop = apple_loop(ffma=1, lload=2, store=1, shr=1)
    assert (loop.counts[Kind.WORKGROUP], loop.counts[GLOBAL], loop.counts[Kind.SLOW_INTEGER]) == (8, 4, 1)


def test_apple_issues_one_instruction_at_a_time() -> None:
    assert bounded(apple_loop(ffma=60, iadd=39), M1) == (pytest.approx(0.6), "issue")
    assert bounded(apple_loop(ffma=60, shuffle=60), M1) == (pytest.approx(60 / 121), "issue")
    assert bounded(apple_loop(ffma=60, shr=30), M1) == (pytest.approx(0.5), "complex")
    assert bound(apple_loop(ffma=2, load=1), M1) is None  # memory decides


def row(cols: int, share: float, default: bool, spilled: int = 0) -> Row:
    loop = nvidia_loop(ffma_ftz=round(1000 * share), mov=1000 - round(1000 * share))
    call = {**CALL, "tiling": Tiling("broadcast", 32, 16, cols, 8).to_json(), "default": default}
    return Row(call, Compiled(120, spilled, 0, 0, 12, 1000, loop), bound=bound(loop, ADA))


def test_the_check_fails_if_a_bound_falls(capsys: pytest.CaptureFixture[str]) -> None:
    before = Answers(GPUS["ada"], 32, "NVK", "Mesa 26", [row(4, 0.6, True), row(2, 0.5, False)])
    predicted = json.loads(json.dumps(predictions_json([before])))
    assert losses(before, predicted) == []
    after = replace(before, rows=[row(4, 0.58, True), row(2, 0.2, False)])
    assert violations([after], predicted) == []
    after.rows[0] = row(4, 0.56, True)
    (sentence,) = violations([after], predicted)
    assert "nf4_matmul_backward nf4 nn, broadcast 16x4, span 8: its bound fell from 0.600" in sentence
    after.driver = "Mesa 27"
    assert violations([after], predicted) == []
    assert "bounds are not compared" in capsys.readouterr().err


def test_tilings_by_bound() -> None:
    rows = [row(4, 0.5, True), row(8, 0.9, False, spilled=3), row(2, 0.4, False), row(1, 0.6, False)]
    assert [item.tiling.cols for item in best_first(rows)] == [1, 4, 2, 8]
    (device,) = json.loads(json.dumps(to_json([Answers(GPUS["ada"], 32, rows=rows)], {})))["devices"]
    assert device["kernels"][0]["bound"]["cycles"] == {"issue": 1000, "FMA": 500, "integer": 1000}
    console = Console(width=200)
    with console.capture() as printed:
        console.print(bounds([Answers(GPUS["ada"], 32, rows=rows)]))
    assert "0.50 issue; 0.60 in broadcast 16x1, span 8" in printed.get()
    rows[-1] = row(1, 0.52, False)
    with console.capture() as printed:
        console.print(bounds([Answers(GPUS["ada"], 32, rows=rows)]))
    assert "0.50 issue" in printed.get()
    assert "0.52" not in printed.get()


def test_a_program_that_a_driver_prints_once_counts_once(tmp_path: Path) -> None:
    child, other = tmp_path / "child.sh", {**CALL, "constants": {**CALL["constants"], "even": True}}  # type: ignore[dict-item]
    child.write_text(
        f"""echo '{MARKER}{json.dumps({"call": CALL})}'; cat {FIXTURES}/gpu_compilers/amd.txt
        echo; echo '{MARKER}{json.dumps({"call": other})}'; echo
        echo '{MARKER}{{"end": true}}'"""
    )
    answers = ask(GPUS["rdna3"], 32, Environment(("sh", str(child))), Selection())
    first, second = answers.rows
    assert (first.compiled, second.compiled) == (SPILLING["rdna3"][1], SPILLING["rdna3"][1])
    assert (first.repeated, second.repeated) == (False, True)
    assert len(violations([answers], NONE)) == 1
    assert len(predictions_json([answers])["devices"][0]["kernels"]) == 2


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
        fields = {"kernel": "matmul_nt", "constants": {"b_type": "f32"}, "bindings": ["a", "b", "y"]}
        return {**fields, "tiling": tiling.to_json(), "default": default}

    used, other = call(Tiling("broadcast", 32, 16, 4, 4), True), call(Tiling(), False)
    answers = [Answers(GPUS["rdna3"], size, "RX 7900 XTX", "RADV") for size in (64, 32)]
    answers[1].rows = [Row(used, Compiled(120, 0, 0, 0, 12, 900, None)), Row(other, None)]
    predicted = json.loads(json.dumps(predictions_json(answers)))
    info = SimpleNamespace(vendor_id=0x1002, name="AMD Radeon RX 7600")
    device: Any = SimpleNamespace(info=info, capabilities=SimpleNamespace(subgroup_size=32))
    prediction = nearest(device, predicted)
    assert prediction is not None
    assert (prediction["gpu"], prediction["subgroup_size"]) == ("rdna3", 32)
    assert figures(prediction, [used, other]) == [
        {"registers": 120, "spilled": 0, "occupancy": 12, "instructions": 900, "bound": None},
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
    monkeypatch.setattr(gpu_report, "figures", lambda _, calls: [{"bound": 0.5} for _ in calls])
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
        assert {record["predicted_bound"] for record in records if record["kind"] == "time"} == {0.5}
        right = {record["kernel"] for record in records if record["kind"] == "kernel" and record["right"]}
        assert {"rmsnorm_forward", "nf4_matmul"} <= right
    else:
        assert [record["reason"] for record in records if record["kind"] == "kernel"] == ["register allocation failed"]
