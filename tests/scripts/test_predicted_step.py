"""The predicted time of a training step: what its dispatches do, and what the model makes of that."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, replace
from typing import Any

import pytest

from scripts.gpu_compilers import __main__ as command
from scripts.gpu_compilers.compiled_shader import Compiled, Kind, Loop
from scripts.gpu_compilers.compiler_run import Answers, Row
from scripts.gpu_compilers.gpus import GPUS
from scripts.gpu_compilers.port_model import bound
from scripts.gpu_compilers.predicted_step import Piece, limits, piece, pieces, report, seconds
from scripts.gpu_compilers.recorded_kernels import Selection, Work, calls
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.tiling import Tiling

RDNA3 = GPUS["rdna3"]
HALF = Loop(100, 50, 100, {Kind.MULTIPLY_ADD: 50, Kind.INTEGER: 50})  # of RDNA3's peak: both take the vector unit
WORK = Work(0, True, 10**9, 10**9, 10**6, 10**6)


def works(device: Device, selection: Selection) -> dict[str, Counter[Work]]:
    """Of the default tilings, by kernel."""
    work = defaultdict[str, Counter[Work]](Counter)
    for call in calls(selection, device):
        work[call.kernel.name] += call.work
    return work


def multiply_adds(counter: Counter[Work]) -> int:
    return sum(count * work.multiply_adds for work, count in counter.items())


def test_the_work_of_a_step_is_that_of_its_formulas(device: Device) -> None:
    rows, length, rank = 2, 16, 4
    selection = Selection(("tiny-qwen3",), tokens=length, rank=rank, candidates=False, batch=rows)
    work = works(device, selection)
    # Hidden 512, MLP 1,536, 8 layers, 8 heads of 64 with 4 of keys, vocabulary 4,096.
    tokens, layers, hidden = rows * length, 8, 512
    sizes = {"q": (512, 512), "k": (512, 256), "v": (512, 256), "o": (512, 512), "gate": (512, 1536), "up": (512, 1536)}
    sizes["down"] = (1536, 512)
    weights = layers * sum(size_in * out for size_in, out in sizes.values())
    ins, outs = (layers * sum(size[side] for size in sizes.values()) for side in (0, 1))
    first = 512 * (512 + 256 + 256)  # q, k and v of the first layer, whose input needs no gradient
    assert multiply_adds(work["nf4_matmul"]) == tokens * (weights + rank * outs)
    assert multiply_adds(work["nf4_matmul_backward"]) == tokens * (weights - first + rank * (ins - 3 * hidden))
    assert multiply_adds(work["lora_nt"]) == tokens * rank * ins
    assert multiply_adds(work["lora_nn"]) == tokens * rank * outs
    assert multiply_adds(work["lora_tn"]) == tokens * rank * (ins + outs)
    assert multiply_adds(work["matmul_nt"]) == multiply_adds(work["matmul_nn"]) == tokens * hidden * 4096
    pairs = rows * length * (length + 1) // 2
    attention = [multiply_adds(work[f"attention_{name}"]) for name in ("forward", "backward_q", "backward_kv")]
    assert attention == [products * layers * pairs * 8 * 64 for products in (2, 3, 4)]
    assert work["swiglu_forward"].total() % layers == 0
    assert multiply_adds(work["swiglu_forward"]) == 0


def test_bytes_of_bindings(device: Device) -> None:
    counters = works(device, Selection(("tiny-qwen3",), tokens=16, rank=4, candidates=False, batch=2))
    (embedded,) = counters["embedding_rows"]
    assert embedded.nbytes == 4 * 32 + 2 * 32 * 512 + 2 * 4 * 32 * 512  # ids, rows of the table in bf16, y twice
    (added,) = {work.nbytes for work in counters["swiglu_forward"]}
    assert added == 3 * 4 * 32 * 1536
    (head,) = counters["matmul_nn"]
    assert head.nbytes == 4 * 32 * 4096 + 2 * 4096 * 512 + 4 * 32 * 512 + 4  # logits, table, y once, count
    wide = {work.nbytes for work in counters["rmsnorm_backward"]}
    assert {4 * (32 * 512 * 3 + 512 + 32), 4 * (32 * 512 * 4 + 512 + 32)} <= wide  # dx is written, or added to


def test_tiles_past_the_edge_take_time(device: Device) -> None:
    selection = Selection(("tiny-qwen3",), tokens=16, rank=4, candidates=False, batch=2)
    thin = works(device, selection)["lora_nt"]
    assert any(work.issued > work.multiply_adds for work in thin)  # 4 columns are no tile
    assert all(work.issued >= work.multiply_adds for counter in works(device, selection).values() for work in counter)


def row(work: dict[Work, int], loop: Loop | None = HALF, spilled: int = 0, threads: int = 64) -> Row:
    tiling = Tiling(lanes=threads)
    call: dict[str, Any] = {"kernel": "product", "constants": {}, "bindings": [], "tiling": tiling.to_json()}
    call["work"] = [[asdict(item), count] for item, count in work.items()]
    return Row(call, Compiled(100, spilled, 0, 0, 12, 100, loop), bound=loop and bound(loop, RDNA3.rates, threads))


def test_the_longer_of_computing_and_memory() -> None:
    of = row({})
    assert of.bound
    assert of.bound.share == 0.5
    computing = 2 * 10**9 / (61.44e12 * 0.5)
    assert piece(RDNA3, of, WORK, 3) == Piece(
        "product", 3, 3 * 10**9, 3 * 10**6, pytest.approx(3 * computing), "VALU", 0.5
    )
    edges = replace(WORK, issued=2.0 * 10**9)
    assert piece(RDNA3, of, edges, 1).seconds == pytest.approx(2 * computing)
    few = replace(WORK, threads=48 * 32)  # subgroups on a quarter of the SIMDs
    assert piece(RDNA3, of, few, 1).seconds == pytest.approx(4 * computing)
    much = piece(RDNA3, of, replace(WORK, nbytes=96 * 10**9), 1)
    assert (much.seconds, much.port, much.bound) == (pytest.approx(0.1), "memory", 0)
    copy = piece(RDNA3, row({}, None), replace(WORK, multiply_adds=0, issued=0), 1)
    assert (copy.seconds, copy.port) == (pytest.approx(1e6 / 960e9), "memory")
    for unknown, its in ((of, replace(WORK, multiply_adds=0)), (row({}, None), WORK)):
        with pytest.raises(UserError, match="The time of product cannot be predicted on RX 7900 XTX"):
            piece(RDNA3, unknown, its, 1)


def test_idle_lanes_of_a_subgroup_do_nothing() -> None:
    narrow, wide = replace(HALF, lanes=32), replace(HALF, lanes=64)
    of = {threads: row({}, wide, threads=threads) for threads in (32, 64)}
    full, half = (piece(RDNA3, of[threads], WORK, 1) for threads in (64, 32))
    assert (half.seconds, half.bound) == (pytest.approx(2 * full.seconds), pytest.approx(full.bound / 2))
    few = replace(WORK, threads=96 * 32)  # 96 workgroups, each on a SIMD of its own
    assert piece(RDNA3, of[32], few, 1).seconds == pytest.approx(2 * half.seconds)
    assert bound(narrow, RDNA3.rates, 32) == bound(narrow, RDNA3.rates)


def test_the_fastest_tiling_of_each_call_that_does_not_spill() -> None:
    other = replace(WORK, default=False)
    fast, faster = (Loop(50 + more, 50, 100, {Kind.MULTIPLY_ADD: 50, Kind.INTEGER: more}) for more in (25, 0))
    rows = [row({WORK: 2, replace(WORK, number=1): 1}), row({other: 2}, fast), row({other: 2}, faster, spilled=1)]
    answers = Answers(RDNA3, 64, driver="Mesa", rows=rows)
    default, best = (pieces(answers, fastest) for fastest in (False, True))
    assert [item.bound for item in default] == [0.5, 0.5]
    assert [item.bound for item in best] == [pytest.approx(2 / 3), 0.5]
    assert seconds(best) == pytest.approx((2 * 0.75 + 1) / 3 * seconds(default))
    assert limits(best) == "0.67 VALU"
    selection = Selection(("qwen2.5-7b",), batch=4)
    text = report({"f32": [replace(answers, rows=rows[:1])], "f16": [answers]}, selection, "--step qwen2.5-7b")
    assert "| `product` | 3 | 0.01 | 0.0 | 0.2 | 0.50 VALU | 0.2 | 0.67 VALU | 100.0% |" in text
    assert "in f16 is 1.20 times as fast as in f32" in text
    assert "and 1.00 times in the default tilings" in text
    assert "A prediction, not a measurement" in text


@pytest.mark.parametrize("wrong", ["4", "4x", "x512", "0x512", "4x1", "4x512x2"])
def test_a_batch_is_rows_and_tokens(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--step", "qwen2.5-7b", "--batch", wrong])
    assert ended.value.code == 2
    assert "argument --batch: " in capsys.readouterr().err


def test_options_that_would_do_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--step", "qwen2.5-7b", "--check"])
    assert ended.value.code == 2
    assert "--step" in capsys.readouterr().err.splitlines()[-1]
