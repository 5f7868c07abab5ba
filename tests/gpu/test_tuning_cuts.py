"""The smaller calls that tilings are checked on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.dispatch import Dispatch
from wgpu_lora.gpu.kernel import REGISTRY
from wgpu_lora.gpu.single_kernel import SingleKernel
from wgpu_lora.gpu.tiling import Capabilities, Tiling
from wgpu_lora.gpu.tiling_check import cut_verdict
from wgpu_lora.ops.attention.attention import attention_forward
from wgpu_lora.ops.matmul.matmul import lora_nn, lora_nt, lora_tn, matmul_nn, matmul_nt
from wgpu_lora.ops.matmul.matmul_tuning import CHECKED, block
from wgpu_lora.weights.gguf.gguf_formats import FORMATS
from wgpu_lora.weights.gguf.gguf_products import gguf_matmul, gguf_matmul_backward
from wgpu_lora.weights.lowbit.lowbit_products import codes_matmul, codes_matmul_backward
from wgpu_lora.weights.nf4.nf4_products import nf4_matmul, nf4_matmul_backward

WHOLE = {"m": 1000, "n": 4864, "k": 896}


SLOTS = {"slots": 2, "stride": 896 * 16 + 64, "first_row": 5}


LOW_RANK = {"stacked": True, "rank": 16, "stride": 128 * 1024, "first_row": 3}  # in a stack


CALLS = [
    (matmul_nt, {**WHOLE, "b_type": "bf16", "y_skip": 6, "y_first": 5}),
    (matmul_nn, {**WHOLE, "b_type": "f16", "a_type": "bf16", "a_skip": 8, "a_first": 4}),
    (nf4_matmul, {**WHOLE, "n1": 200, "n2": 1002, **LOW_RANK, "h_skip": 32, "adapted_parts": "101"}),
    (nf4_matmul_backward, {**WHOLE, "k1": 200, "k2": 1002, **LOW_RANK}),
    (nf4_matmul, {**WHOLE, "k": 900}),
    (nf4_matmul_backward, {**WHOLE, "n": 904, "k": 4863}),
    (codes_matmul, {**WHOLE, "n1": 200, "n2": 1002, **LOW_RANK, "h_skip": 32, "adapted_parts": "101", "bits": 2}),
    (codes_matmul, {**WHOLE, "bits": 3, "group": 64}),
    (codes_matmul, {**WHOLE, "k": 900, "bits": 8, "group": 0}),
    (codes_matmul_backward, {**WHOLE, "k1": 200, "k2": 1002, **LOW_RANK, "bits": 4, "group": 64}),
    (codes_matmul_backward, {**WHOLE, "n": 904, "k": 4863, "bits": 3, "group": 0}),
    (gguf_matmul, {**WHOLE, "n1": 200, "n2": 1002, **LOW_RANK, "h_skip": 32, "adapted_parts": "101"}),
    (gguf_matmul, {**WHOLE, "k": 4096, "b_type": "q6_k", "w_skip": 1001, "w_first": 640}),
    (gguf_matmul_backward, {**WHOLE, "k1": 200, "k2": 1002, **LOW_RANK, "b_type": "q5_0"}),
    (gguf_matmul_backward, {**WHOLE, "n": 4096, "k": 4863, "b_type": "q4_k", "w_skip": 1001, "w_first": 640}),
    (lora_nt, {"m": 1000, "n": 16, "k": 896, **SLOTS}),
    (lora_nn, {"m": 1000, "n": 896, "k": 16, **SLOTS}),
    (lora_tn, {"m": 896, "n": 16, "k": 1000, **SLOTS}),
]


# (rows, columns) of a workgroup: 16 x 32 as on a CPU, 8 x 128 and 16 x 256 as on GPUs, and 128 x 128
TILINGS = [Tiling("broadcast", 8, 16, 4, 4), Tiling("plain", 32, 8, 4, 8), Tiling("broadcast", 64, 16, 4, 16)]
TILINGS += [Tiling("workgroup", 32, 128, 4, 32)]


@pytest.mark.parametrize("tiling", TILINGS, ids=[f"{tiling.rows}x{tiling.lanes * tiling.cols}" for tiling in TILINGS])
@pytest.mark.parametrize(("kernel", "constants"), CALLS, ids=[kernel.name for kernel, _ in CALLS])
def test_a_check_is_small_and_takes_the_same_paths(kernel: Any, constants: dict[str, Any], tiling: Tiling) -> None:
    """The same shader, whole blocks where the call has them, and the same edges."""
    full = {**kernel.defaults, **constants}
    unit = FORMATS[full["b_type"]].block if full.get("b_type") in FORMATS else 1
    for more in (0, 8, 64, 192) if unit == 1 else (0, unit, 3 * unit):
        full = {**kernel.defaults, **constants}
        full["n"] += more if full["n"] > 16 else 0
        small = kernel.tuning.cut(full, tiling)
        assert kernel.compiled_in(small) == kernel.compiled_in(full)
        steps = dict(zip("mnk", (*block(tiling), tiling.span), strict=True))
        for name, step in (
            (name, steps[name[0]]) for name in ("m", "n", "n1", "n2", "k", "k1", "k2") if full.get(name)
        ):
            assert small[name] % step == full[name] % step
            assert small[name] >= min(full[name], 2 * step)
            assert small[name] <= 4 * max(CHECKED, step, unit)
        assert small["k" if full.get("form") == "nt" else "n"] % unit == 0
        assert kernel.tuning.work(small) < kernel.tuning.work(full)


@pytest.mark.parametrize("tiling", [Tiling("broadcast", 8, 2, 1), Tiling("broadcast", 64, 2, 4)])
@pytest.mark.parametrize(("rows", "keys"), [(1000, 1000), (1024, 1024), (1, 900), (300, 2003), (20, 20)])
def test_a_check_of_attention(rows: int, keys: int, tiling: Tiling) -> None:
    full = {"rows": rows, "keys": keys, "kv_heads": 2, "group": 7, "dim": 64, "scale": 1.0}
    small = attention_forward.tuning.cut(full, tiling)
    per, queries = tiling.lanes * tiling.rows, small["rows"]
    assert queries * 7 % per == rows * 7 % per
    assert queries <= min(rows, 2 * max(per, 32))
    assert queries <= small["keys"] <= min(keys, queries + 64)
    assert {**small, "rows": rows, "keys": keys} == full


@pytest.mark.parametrize("keys", [16, 304, 464])
def test_a_check_of_attention_over_a_cache_with_far_fewer_keys_than_rows(keys: int) -> None:
    shape = {"rows": 512, "keys": keys, "kv_heads": 2, "group": 7, "dim": 64, "scale": 1.0, "block": 16}
    small = attention_forward.tuning.cut({**attention_forward.defaults, **shape}, Tiling("broadcast", 8, 2, 1))
    arrays = attention_forward.tuning.inputs(small, ("k", "blocks"), np.random.default_rng(0))
    assert len(arrays["k"]) == small["keys"] == 16 * arrays["blocks"].size > 0


def test_a_check_of_attention_with_fewer_keys_than_rows(device: Device) -> None:
    """A prompt in a bucket that is longer than the cache. A key range that wrapped around never ended."""
    full = {**attention_forward.defaults, "rows": 32, "keys": 29, "kv_heads": 3, "group": 3, "dim": 64, "scale": 0.125}
    ranges = attention_forward.tuning.inputs(full, ("ranges",), np.random.default_rng(0))["ranges"]
    assert ranges[:, 1].max() <= 29
    present = tuple(name for name in attention_forward.bindings if name not in attention_forward.optional)
    call = Dispatch(attention_forward, (), present, full, Tiling(), (1, 1, 1))
    assert cut_verdict(device, call, attention_forward.tilings(device.capabilities, full)[0]).right


@pytest.mark.filterwarnings("ignore::wgpu_lora.errors.DeviceWarning")
@pytest.mark.parametrize("lanes", [32, 64])
@pytest.mark.parametrize("edge", [False, True], ids=["whole blocks", "ragged edge"])
def test_a_fault_in_some_blocks_of_a_tiling_is_found(
    device: Device, monkeypatch: pytest.MonkeyPatch, lanes: int, edge: bool
) -> None:
    """4800 columns are whole blocks of 64, but not of 128 and 256."""
    tiling, columns = Tiling("plain", lanes, 8, 4, 4), 4 * lanes
    constants = {**matmul_nt.defaults, "m": 8, "n": 4800, "k": 64}
    call = Dispatch(matmul_nt, (), ("a", "b", "y"), constants, Tiling(), (1, 1, 1))
    read = SingleKernel.read
    assert cut_verdict(device, call, tiling).right

    def damaged(self: SingleKernel, name: str) -> Any:
        values = read(self, name)
        whole = values.shape[1] // columns * columns
        values[:, slice(whole, None) if edge else slice(whole)] = 0
        return values

    monkeypatch.setattr(SingleKernel, "read", damaged)
    assert not cut_verdict(device, call, tiling).right


def test_every_heavy_kernel_is_right_on_its_own_sample(device: Device) -> None:
    """Each sample makes inputs that the kernel's reference and shader agree on: otherwise nothing would be chosen."""
    attention = {"rows": 20, "kv_heads": 2, "group": 2, "dim": 8, "scale": 0.35}
    heavy = {kernel.name: kernel for kernel in REGISTRY.values() if kernel.tuning}
    constants_of = {kernel.name: {**kernel.defaults, **constants} for kernel, constants in CALLS}
    for name in heavy.keys() - constants_of.keys():
        keys = {"keys": 20} if "keys" in heavy[name].constants else {}
        constants_of[name] = {**attention, **keys}
    assert constants_of.keys() == heavy.keys()
    assert attention_forward.name in heavy
    for name, kernel in heavy.items():
        present = tuple(n for n in kernel.bindings if n not in ("row_scale", "a_scale", "count"))
        call = Dispatch(kernel, (), present, constants_of[name], Tiling(), (1, 1, 1))
        assert cut_verdict(device, call, kernel.tilings(device.capabilities, constants_of[name])[0]).right, name


def test_tilings_that_would_spill_are_not_offered() -> None:
    """By the compilers' table: 64 sums, of a product that needs more registers beside them than Apple's GPUs have."""
    constants = {**nf4_matmul_backward.defaults, **WHOLE}

    def offered(kernel: Any, registers: int) -> list[tuple[int, int]]:
        tilings = kernel.tilings(Capabilities(32, registers=registers), {**kernel.defaults, **constants})
        return [(tiling.rows, tiling.cols) for tiling in tilings if tiling.family == "broadcast"]

    assert (16, 4) in offered(nf4_matmul_backward, 256)
    assert offered(nf4_matmul_backward, 128)
    assert (16, 4) not in offered(nf4_matmul_backward, 128)
    assert offered(nf4_matmul, 128) == offered(nf4_matmul, 256)
