"""Writes the expanded matrix products of tests/fixtures/kernels: python -m scripts.golden.kernel_texts"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from wgpu_lora.bench.kernel_texts import kernel_text
from wgpu_lora.gpu.backends import MatrixConfiguration
from wgpu_lora.gpu.dispatch import Dispatch
from wgpu_lora.gpu.kernel import Kernel
from wgpu_lora.gpu.tiling import Capabilities
from wgpu_lora.ops.matmul.matmul import matmul_nt
from wgpu_lora.weights.nf4.nf4_products import nf4_matmul, nf4_matmul_backward

FOLDER = Path(__file__).parents[2] / "tests" / "fixtures" / "kernels"
GPU = Capabilities(32, f16=True, int64=True, registers=131)  # so few that products broadcast in a subgroup by default
UNITS = replace(GPU, registers=256, workgroup_bytes=32768, matrix=MatrixConfiguration(16, 16, 16, "f16", "f32", 32))
LORA = {"rank": 16, "h_skip": 0, "h_first": 0, "stride": 16384}
LORA_BINDINGS = "h", "factor", "ranges"


def texts() -> Iterator[tuple[str, str]]:
    """(name, text) of each, in a GPU's default tiling."""
    attention = {"k": 896, "n": 896, "n1": 128, "n2": 128, "stacked": True}
    gate_and_up = {"k": 896, "n": 4864, "n1": 4864, "stacked": True, "gated": True}
    yield "nf4_forward", _text(nf4_matmul, m=512, n=896, k=4864)
    yield "nf4_gradient", _text(nf4_matmul_backward, m=512, n=4864, k=896)
    yield "bf16_forward", _text(matmul_nt, m=512, n=896, k=896, b_type="bf16")
    yield "nf4_few_rows", _text(nf4_matmul, m=1, n=896, k=896)
    yield "nf4_stacked_with_lora", _text(nf4_matmul, *LORA_BINDINGS, m=512, **attention, **LORA)
    yield "nf4_workgroup", _text(nf4_matmul, capabilities=Capabilities(0), m=512, n=896, k=4864)
    yield "nf4_matrix", _text(nf4_matmul, "a_scale", capabilities=UNITS, m=512, n=896, k=4864, a_type="f16")
    yield "nf4_gated_few_rows", _text(nf4_matmul, m=1, **gate_and_up)


def _text(kernel: Kernel, *optional: str, capabilities: Capabilities = GPU, **constants: Any) -> str:
    c = {name: constants.get(name, default) for name, default in kernel.defaults.items() if name in kernel.constants}
    c |= constants
    present = tuple(name for name in kernel.bindings if name not in kernel.optional or name in optional)
    tilings = kernel.tilings(capabilities, c)
    return kernel_text(Dispatch(kernel, (), present, c, tilings[0], kernel.groups(c, tilings[0])), tilings)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in texts():
        (FOLDER / f"{name}.wgsl").write_text(text)


if __name__ == "__main__":
    main()
