"""The texts of kernels: golden files of the matrix products, and the commands that print what a device gets."""

from __future__ import annotations

import pytest
from support.bench import MINI_ROW
from support.cli import Run, commands

from scripts.golden import kernel_texts
from wgpu_lora.gpu.device import Device
from wgpu_lora.models import published_shapes

TEXTS = dict(kernel_texts.texts())


@pytest.mark.parametrize("name", TEXTS)
def test_golden(name: str) -> None:
    """`python -m scripts.golden.kernel_texts` writes them anew after an intended change."""
    assert TEXTS[name] == (kernel_texts.FOLDER / f"{name}.wgsl").read_text()


def test_all_golden_files_are_compared() -> None:
    assert {path.stem for path in kernel_texts.FOLDER.iterdir()} == TEXTS.keys()


@pytest.fixture
def run(device: Device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setattr("wgpu_lora.gpu.device.Device", lambda selector: device)
    monkeypatch.setitem(published_shapes._ROWS, "mini", MINI_ROW)
    monkeypatch.setattr("wgpu_lora.bench.kernel_texts.TOKENS", 16)  # it has 64 positions
    return commands(capsys, "kernels")


def test_list(run: Run) -> None:
    printed = run("list", "--shape", "mini").out
    rows = [line.split() for line in printed.splitlines()]
    names = {row[0] for row in rows[1:]}
    assert {"nf4_matmul", "nf4_matmul_backward", "attention_forward", "adamw", "rmsnorm_forward"} <= names
    assert any("training, prefill" in line for line in printed.splitlines())


def test_show(run: Run, device: Device) -> None:
    heading, _, text = run("show", "nf4_matmul", "--shape", "mini").out.partition("\n\n")
    assert "formula   y[m, n] (+)= a_scale[m] sum_k a[m, k] W[n, k]" in heading
    assert "0 a (in), 1 codes (fixed), 2 scales (in), 3 y (inout)" in heading
    assert "const LANES: u32 = " in text
    assert "fn main(" in text
    tilings = heading.partition("tiling    ")[2].partition("// grid")[0].replace("//", "")
    default, *alternatives = (word.rstrip(",;") for word in tilings.split() if word != "also")
    assert alternatives
    other = run("show", "nf4_matmul", "--shape", "mini", "--tiling", alternatives[-1]).out
    assert f"tiling    {alternatives[-1]}; also {default}" in other
    assert other.partition("\n\n")[2] != text


def test_show_another_call(run: Run) -> None:
    first, second = (run("show", "nf4_matmul", "--shape", "mini", "--call", str(n)).out for n in (1, 2))
    assert first != second


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nf4_matmol", "mini in nf4 has no kernel 'nf4_matmol': did you mean nf4_matmul"),
        ("codes_matmul", "mini in nf4 has no kernel 'codes_matmul': did you mean nf4_matmul"),
        ("zzz", "mini in nf4 has no kernel 'zzz': 'wgpu-lora kernels list' names them."),
        ("nf4_matmul --tiling broadcast-8", "nf4_matmul has no tiling 'broadcast-8' here: choose one of broadcast-"),
        ("nf4_matmul --call 99", "--call 99 is not possible: nf4_matmul has "),
        ("nf4_matmul --shape qwen", "The shape qwen is not known: choose one of qwen2.5-0.5b, "),
        ("nf4_matmul --base-dtype int5", "int5"),
    ],
)
def test_refusals(run: Run, arguments: str, message: str) -> None:
    assert message in run("show", *f"--shape mini {arguments}".split()).refusal()
