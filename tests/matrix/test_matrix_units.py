"""Products on matrix units, on a device that has them: `make test-matrix` runs these on lavapipe of the newest Mesa."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.kernels import Case

import wgpu_lora
from wgpu_lora.gpu.backends import WGPU
from wgpu_lora.gpu.device import Device, DeviceOptions
from wgpu_lora.gpu.dispatch import Dispatch
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tiling import MATRIX, Capabilities
from wgpu_lora.gpu.tiling_check import cut_verdict
from wgpu_lora.ops.half_precision import head_operand
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.prepare_job import prepare_job

sys.path.append(str(Path(__file__).parents[1] / "gpu"))
from test_kernels import PRODUCTS

F16_SUMS = "nf4_matmul", "nf4_matmul_backward", "matmul_nt"
CORE = [case for case in PRODUCTS if case.constants["k"] % 2 == 0][::2]

STEPS = 200
ROWS = 300  # of the batch: two blocks and an edge


@pytest.mark.parametrize("case", [pytest.param(c, id=c.label) for c in PRODUCTS if c.constants["k"] % 2 == 0])
def test_products(units: Device, case: Case) -> None:
    """Every base format, orientation and epilogue against float64."""
    kernel = case.kernel
    constants: dict[str, Any] = {**kernel.defaults, **case.constants, "m": ROWS, "a_type": "f16"}
    present = tuple(name for name in kernel.bindings if name in case.make(np.random.default_rng(0)) and name != "count")
    offered = [item for item in kernel.tilings(units.capabilities, constants) if item.family == MATRIX]
    assert offered
    few = offered[-1]  # the smallest tile, which compiles the fastest
    many = replace(few, lanes=8 * few.lanes, subgroups=8 * few.subgroups, rows=8, cols=4)  # where a thread decodes less
    for tiling in (few, many):
        verdict = cut_verdict(units, Dispatch(kernel, (), present, constants, tiling, (1, 1, 1)), tiling)
        assert verdict.right, (tiling, verdict)


@pytest.mark.parametrize("case", [pytest.param(c, id=c.label) for c in CORE if c.kernel.name in F16_SUMS])
def test_products_with_sums_in_f16(units: Device, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """As on a device that has no others: every 32 steps they are added to sums in f32."""
    assert units.capabilities.matrix
    in_f16 = replace(units.capabilities, matrix=replace(units.capabilities.matrix, sums="f16"))
    monkeypatch.setattr(units, "capabilities", in_f16)
    test_products(units, case)


def test_units_with_sums_in_f16_are_the_second_choice(units: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = units.capabilities.matrix
    assert wide
    narrow = replace(wide, sums="f16")
    for listed, expected in (((narrow, wide), wide), ((narrow,), narrow), ((replace(wide, inputs="u8"),), None)):
        monkeypatch.setattr(units, "info", replace(units.info, matrices=listed))
        assert units._matrix() == expected


def test_bf16_rounds_to_f16(units: Device) -> None:
    """Since that is what the units multiply, and the LM head is rounded for them."""
    rec = Recorder(Program(units, "rounding"), compute_dtype="bf16")
    assert rec.compute_dtype == "f16"
    assert head_operand(rec, rec.temp((64, 64)), 64, keep=True)[2] == "f16"
    assert units.capabilities.operand_dtype("f32") == "f32"
    assert Capabilities(32).operand_dtype("bf16") == "bf16"
    model = wgpu_lora.load("demo", device=units)
    notes = {}
    for dtype in ("bf16", "f16"):
        job = prepare_job(TrainingArguments(compute_dtype=dtype), model, planning=True)
        assert job.run.args.compute_dtype == dtype, "what was asked for is what is recorded"
        notes[dtype] = [note for note in job.run.notes if note.startswith("rounding:")]
    assert notes == {"bf16": ["rounding: to f16 instead of bf16, for the matrix units"], "f16": []}


def test_training_is_that_of_f32(units: Device, tmp_path: Path) -> None:
    """The demo's losses after 200 steps, and answers of the adapter."""
    losses = {}
    for device, compute_dtype in ((units, "f16"), (Device(options=DeviceOptions(backend=WGPU)), "f32")):
        model = wgpu_lora.load("demo", device=device)
        options = {"max_steps": STEPS, "eval_steps": STEPS, "output": str(tmp_path / compute_dtype)}
        record = wgpu_lora.finetune(model, recipe="demo", compute_dtype=compute_dtype, progress_bar=False, **options)
        losses[compute_dtype] = record.state.last_eval_loss
        used = {key[-1].family for key in device._pipelines if hasattr(key[-1], "family")}
        assert (MATRIX in used) == (device is units)
        answer = wgpu_lora.generate(model, "Write a function that returns the sum.", adapter=options["output"])
        assert "def" in str(answer)
    assert losses["f16"] == pytest.approx(losses["f32"], rel=0.01)


def test_kernels_have_cases_in_f16() -> None:
    assert {case.kernel.name for case in PRODUCTS} >= {"matmul_nt", "matmul_nn", "nf4_matmul", "gguf_matmul_backward"}
