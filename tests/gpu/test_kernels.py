"""Every declared kernel against its own float64 reference, in every tiling that the device can run."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import support.kernels
from support.kernels import CASES, Case
from support.sampling import sample

import wgpu_lora.ops
import wgpu_lora.train.objectives
import wgpu_lora.train.optimizers
import wgpu_lora.weights
from wgpu_lora.gpu.backends import DAWN, installed
from wgpu_lora.gpu.device import Device, DeviceOptions
from wgpu_lora.gpu.kernel import F32, REGISTRY, U32
from wgpu_lora.gpu.reference_values import as_float64
from wgpu_lora.gpu.single_kernel import SingleKernel
from wgpu_lora.gpu.struct import struct_array, struct_columns, struct_words, wgsl_struct
from wgpu_lora.gpu.tiling import WORKGROUP, Capabilities, Tiling
from wgpu_lora.ops.elementwise import fill
from wgpu_lora.ops.loss.loss import softmax_chunk
from wgpu_lora.ops.matmul.matmul import FILE

NMSE = 1e-11  # mean squared error over the mean square of the reference: 3e-6 relative, a few dozen roundings of f32
WORST = 1e-5  # of (|value| + root mean square), for any one value

for package in (wgpu_lora.ops, wgpu_lora.weights, wgpu_lora.train.objectives, wgpu_lora.train.optimizers):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
for family in pkgutil.iter_modules(support.kernels.__path__, "support.kernels."):
    importlib.import_module(family.name)

ALL = [case for cases in CASES.values() for case in cases]
CORE = [cases[0] for cases in CASES.values()]


def marked() -> list[Any]:
    return [
        pytest.param(c, id=c.label, marks=[pytest.mark.drivers] if c in CORE else [pytest.mark.slow] if c.rare else [])
        for c in ALL
    ]


def reference(case: Case, arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    operands = {name: as_float64(arrays[name]) if name in arrays else None for name in case.kernel.bindings}
    result = case.kernel(**operands, **case.constants)
    return [
        np.asarray(values).reshape(arrays[name].shape)
        for name, values in zip(case.outputs(arrays), result if isinstance(result, tuple) else (result,), strict=True)
    ]


def compare(name: str, got: np.ndarray, want: np.ndarray) -> None:
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite].astype(got.dtype), err_msg=name)
    got, want = got[finite].astype(np.float64), want[finite]
    assert np.isfinite(got).all(), f"{name}: {np.count_nonzero(~np.isfinite(got))} of {got.size} are not finite"
    error, mean_square = got - want, (want**2).mean()
    assert (error**2).mean() <= NMSE * mean_square, f"{name}: NMSE {(error**2).mean() / mean_square:.2g}"
    worst = (np.abs(error) / (np.abs(want) + np.sqrt(mean_square) + 1e-30)).max()
    assert worst <= WORST, f"{name}: an error of {worst:.2g}"


def compare_codes(case: Case, arrays: dict[str, np.ndarray], got: np.ndarray) -> None:
    """Exact, except that a value on a threshold may fall either way."""
    shifts = 4 * np.arange(8, dtype=np.uint32)
    nudged = [reference(case, {**arrays, "w": as_float64(arrays["w"]) * (1 + e)})[0] for e in (-1e-6, 0, 1e-6)]
    allowed = [words.astype(np.uint32)[..., None] >> shifts & 15 for words in nudged]
    codes = got[..., None] >> shifts & 15
    assert np.logical_or.reduce([codes == a for a in allowed]).all()


def compare_coarse(case: Case, arrays: dict[str, np.ndarray], name: str, got: np.ndarray) -> None:
    """Between the references of inputs that are slightly smaller and larger."""
    at, moving = case.outputs(arrays).index(name), as_float64(arrays[case.moving])
    results = [
        reference(case, {**arrays, case.moving: moving * (1 + e)})[at].astype(np.float64)
        for e in (-1e-5, -1e-6, 0, 1e-6, 1e-5)
    ]
    assert ((got >= np.minimum.reduce(results)) & (got <= np.maximum.reduce(results))).all(), name
    assert (np.minimum.reduce(results) == np.maximum.reduce(results)).mean() > 0.99


def main_tilings(device: Device, case: Case) -> Sequence[Tiling]:
    """The default, and the last, which needs no subgroups."""
    tilings = case.kernel.tilings(device.capabilities, case.constants)
    return tilings[:1] if case.slow else tilings[:: max(1, len(tilings) - 1)]


def check(case: Case, rng: np.random.Generator, tilings: Sequence[Tiling], *devices: Device) -> None:
    arrays = case.make(rng)
    expected = reference(case, arrays)
    for device, tiling in itertools.product(devices, tilings):
        before = device.allocated
        single = SingleKernel(device, case.kernel, arrays, case.constants, tiling)
        single.run()
        for name, want in zip(case.outputs(arrays), expected, strict=True):
            initial, got = arrays[name], single.read(name)
            if got.dtype in (np.uint16, np.float16):
                initial, got = as_float64(initial), as_float64(got)
            if name in case.coarse:
                compare_coarse(case, arrays, name, got)
                continue
            if got.dtype == np.uint32 and "w" in arrays:
                compare_codes(case, arrays, got)
            elif got.dtype == np.uint32:
                np.testing.assert_array_equal(got, want, err_msg=f"{name} with {tiling}")
            else:
                if case.spared:
                    want = want.copy()
                    want[case.spared(tiling) :] = initial[case.spared(tiling) :]
                clear = ~case.vague.get(name, np.zeros(want.shape, bool))
                compare(f"{name} with {tiling}", got[clear], want[clear])
            # what a kernel does not own it must not touch, not even to write the same value rounded
            alone = want == initial
            np.testing.assert_array_equal(got[alone], initial[alone], err_msg=f"{name} with {tiling} left alone")
        single.free()
        assert device.allocated == before


@pytest.mark.parametrize("case", marked())
def test_kernel(device: Device, checked_device: Device, case: Case, rng: np.random.Generator) -> None:
    """The core case of each kernel also with the driver's own bounds checks, within WebGPU's default limits."""
    check(case, rng, main_tilings(device, case), device, *([checked_device] if case in CORE else []))


PRODUCTS = [case for case in ALL if case.kernel.file == FILE and "slots" not in case.constants and not case.rare]
SHARED = {size: Tiling(WORKGROUP, size, 8, 8, 16) for size in (64, 128)}
SMALL = Tiling(WORKGROUP, 64, 4, 4, 8)  # the same text with fewer registers, since CPU drivers are slow to compile it


@pytest.mark.parametrize("case", [pytest.param(case, id=case.label) for case in PRODUCTS])
def test_products_through_workgroup_memory(
    device: Device, checked_device: Device, case: Case, rng: np.random.Generator
) -> None:
    """In the family `workgroup`, which CPU drivers are not offered."""
    whole = case in CORE and case.kernel.name.startswith(("nf4", "matmul"))
    check(case, rng, [SMALL, *(SHARED.values() if whole else ())], checked_device if case in CORE else device)


def test_a_gpu_without_subgroups_multiplies_through_workgroup_memory() -> None:
    case = next(case for case in PRODUCTS if case.kernel.name == "nf4_matmul")
    call = {**case.constants, "m": 512}
    assert case.kernel.tilings(Capabilities(0), call)[0] == SHARED[64]
    assert case.kernel.tilings(Capabilities(0, software=True), call)[0].family == "plain"
    assert case.kernel.tilings(Capabilities(0), {**call, "m": 1})[0].family == "plain"
    assert SHARED[64] in case.kernel.tilings(Capabilities(32), call)
    assert SHARED[64] not in case.kernel.tilings(Capabilities(32, registers=128), call)


@pytest.mark.slow
@pytest.mark.parametrize("case", sample([c for c in ALL if not c.slow], 1 / 3), ids=lambda case: case.label)
def test_kernel_in_other_tilings(device: Device, case: Case, rng: np.random.Generator) -> None:
    main = main_tilings(device, case)
    tilings = [tiling for tiling in case.kernel.tilings(device.capabilities, case.constants) if tiling not in main]
    if not tilings:
        pytest.skip("no other tilings of it on this device: test_kernel ran them all")
    check(case, rng, tilings, device)


# On 8 lanes, of the three widths of a lane's columns, and of two vectors per lane; the last is over a cache.
ATTENTION = [
    c
    for name in sorted(CASES)
    for c in CASES[name]
    if "ranges" in c.kernel.bindings and c.constants.get("dim") in (10, 64, 6)
]


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(c, id=c.label) for c in ATTENTION])
def test_attention_of_gpus(device: Device, case: Case, rng: np.random.Generator) -> None:
    """Software drivers are offered other tilings."""
    size = device.capabilities.subgroup_size
    if not device.capabilities.software or not size:
        pytest.skip("the tests above ran these tilings" if size else "the device has no subgroups")
    offered = case.kernel.tilings(Capabilities(size, registers=64), case.constants)  # few, so that they compile quickly
    check(case, rng, offered[:1], device)


# Segments of grouped heads, without and with a cap; forks; two vectors of a thread's columns, a window and a cap.
ATTENTION = [c for c in ALL if "ranges" in c.kernel.bindings and not c.constants.get("block")]
THROUGH_MEMORY = [c for c in ATTENTION if c.constants.get("dim") in (10, 12, 256)]
HELD = Tiling(WORKGROUP, 64, 32, span=32)  # the one with the fewest registers for small heads


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.label, marks=[] if c in CORE else pytest.mark.slow) for c in THROUGH_MEMORY]
)
def test_attention_through_workgroup_memory(
    device: Device, checked_device: Device, case: Case, rng: np.random.Generator
) -> None:
    """In the family `workgroup`, which CPU drivers are not offered."""
    check(case, rng, [HELD], checked_device if case in CORE else device)


@pytest.mark.parametrize("name", ["attention_forward", "attention_backward_q", "attention_backward_kv"])
def test_attention_of_gpus_goes_through_workgroup_memory_first(name: str) -> None:
    kernel = REGISTRY[name]
    for registers, dim in itertools.product((128, 256), (64, 80, 96, 128)):
        call = {**kernel.defaults, "rows": 512, "kv_heads": 2, "group": 2, "dim": dim, "scale": 0.1}
        first, *alternatives = kernel.tilings(Capabilities(0, registers=registers), call)
        assert first.family == WORKGROUP
        assert alternatives[-1].family == "plain"
        assert kernel.tilings(Capabilities(32, registers=registers), call)[0] == first
        assert kernel.tilings(Capabilities(0, registers=16), call)[0].family == "plain"
        assert kernel.tilings(Capabilities(0, registers=registers), {**call, "rows": 1})[0].family == "plain"
        assert {tiling.family for tiling in kernel.tilings(Capabilities(0, software=True), call)} == {"plain"}


@pytest.mark.parametrize("name", ["attention_forward", "attention_backward_q", "attention_backward_kv"])
def test_attention_fits_the_workgroup_memory_of_every_gpu(name: str) -> None:
    kernel, sizes = REGISTRY[name], []
    for registers, dim in itertools.product((128, 256), (4, 64, 80, 96, 128, 256, 512)):
        call = {**kernel.defaults, "rows": 512, "kv_heads": 2, "group": 2, "dim": dim, "scale": 0.1}
        call |= {} if name.endswith("kv") else {"keys": 512}
        present = tuple(n for n in kernel.bindings if n not in kernel.optional)
        for tiling in kernel.tilings(Capabilities(0, registers=registers), call)[:-1]:
            assert tiling.lanes <= 256
            sizes.append(workgroup_bytes(kernel.source(present, call, tiling)))
    assert 4096 < max(sizes) <= 16384


FORWARD = [c for name in ("lora_nt", "matmul_nt", "nf4_matmul", "codes_matmul") for c in CASES[name]]


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.label, marks=[] if c in CORE else pytest.mark.slow) for c in FORWARD]
)
def test_products_of_few_rows_on_gpus(device: Device, case: Case, rng: np.random.Generator) -> None:
    """Slices of the contraction, which software drivers are not offered; they may have more rows, too."""
    size = device.capabilities.subgroup_size
    if size < 4:
        pytest.skip("the device has no subgroups")
    wide = device.capabilities.int64
    check(case, rng, [Tiling("few", size, rows=2, cols=2, span=16, slices=size // 2, wide=wide)], device)


def test_every_kernel_has_cases() -> None:
    assert set(REGISTRY) == set(CASES)
    assert len({case.label for case in ALL}) == len(ALL)


@pytest.fixture(scope="module")
def dawn() -> Device | None:
    """The same device through Dawn."""
    return Device(options=replace(DeviceOptions.from_environment(), backend=DAWN)) if installed(DAWN) else None


SUBGROUP_SIZES = sample([0, 4, 8, 16, 32, 64], 1 / 3)


def texts(case: Case, subgroup_size: int) -> dict[str, Any]:
    arrays = case.make(np.random.default_rng(0))
    present = tuple(name for name in case.kernel.bindings if name in arrays)
    constants = {**case.kernel.defaults, **case.constants}
    tilings = case.kernel.tilings(Capabilities(subgroup_size, int64=subgroup_size > 0), case.constants)
    return {case.kernel.source(present, constants, t): t for t in (tilings if case in CORE else tilings[:1])}


def workgroup_bytes(text: str) -> int:
    """The workgroup memory that a shader declares."""
    pattern = r"var<workgroup>\s*\w+\s*:\s*array<(?:f32|u32|i32|atomic<u32>|vec([24])<f32>), *(\d+)>"
    shared = re.findall(pattern, text)
    assert text.count("var<workgroup>") == len(shared)
    return sum(4 * int(width or 1) * int(count) for width, count in shared)


@pytest.mark.parametrize("name", sorted(CASES))
def test_texts_are_valid_within_default_limits(device: Device, dawn: Device | None, name: str) -> None:
    """Also the tilings of devices that are not here; only a device with subgroups takes shaders that have them. In Naga
    and, except for 64-bit integers, in Tint."""
    sizes = SUBGROUP_SIZES if "subgroup" in device.features else [0]
    for text, tiling in {k: v for case in CASES[name] for size in sizes for k, v in texts(case, size).items()}.items():
        for gpu in (device, dawn):
            if gpu and (gpu is device or "u64" not in text):
                gpu.webgpu.module(gpu.raw, text, f"{name} {tiling}", checked=True)
        assert text.count("var<storage") <= 8
        # && and || skip their right side in some lanes, of which others then read undefined values (on NVIDIA)
        assert not re.search(r"(&&|\|\|)[^;{}]*\bsubgroup[A-Z]", text)
        (size,) = re.findall(r"@workgroup_size\(([^)]*)\)", text)
        assert np.prod([int(part) for part in size.split(",")]) <= 256
        assert workgroup_bytes(text) <= 16384


# -- structs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    fast: F32 = 0.25
    slow: F32 = 0.0


@dataclass(frozen=True)
class Mixed:
    rate: F32
    count: U32


def test_one_declaration_gives_text_bytes_and_columns() -> None:
    assert wgsl_struct(Mixed) == "struct Mixed { rate: f32, count: u32 }\n"
    call = (("y",), {"size": 7}, Tiling())
    assert replace(fill, structs=(Rates,)).source(*call) == f"{wgsl_struct(Rates)}\n{fill.source(*call)}"
    assert struct_words(Rates) == 2
    rates = struct_array(Rates, [Rates(slow=0.5), None])
    np.testing.assert_array_equal(rates, np.array([[0.25, 0.5], [0, 0]], np.float32))
    assert rates.dtype == np.float32
    assert struct_columns(Rates, rates.astype(np.float64)).slow.tolist() == [0.5, 0]
    mixed = struct_array(Mixed, [Mixed(0.5, 2**32 - 1)])
    assert (mixed.dtype, mixed.shape) == (np.uint32, (1, 2))
    columns = struct_columns(Mixed, mixed)
    assert (columns.rate[0], columns.count[0]) == (0.5, 2**32 - 1)


def test_other_annotations_are_refused() -> None:
    @dataclass
    class Wrong:
        name: str

    with pytest.raises(TypeError, match="Wrong: name must be annotated as F32"):
        wgsl_struct(Wrong)


OLD = [
    (
        {"rows": 16, "cols": 2, "span": 8, "wide": 1, "sg": 8, "lanes": 8},
        Tiling("broadcast", 8, rows=16, cols=2, span=8, wide=True),
    ),
    ({"rows": 8, "cols": 4, "span": 4, "wide": 0, "sg": 0, "lanes": 32}, Tiling("plain", 32, rows=8, cols=4, span=4)),
    ({"sg": 8, "lanes": 8, "wide": 0}, Tiling("broadcast", 8)),
    (
        {"sg": 32, "lanes": 32, "wide": 0, "queries": 1, "keys_per_step": 4},
        Tiling("broadcast", 32, rows=1, span=4),
    ),
]


@pytest.mark.parametrize(("old", "tiling"), OLD)
def test_tilings_are_read_as_they_are_written_and_as_0_1_wrote_them(old: Any, tiling: Tiling) -> None:
    assert Tiling.from_json(old) == Tiling.from_json(tiling.to_json()) == tiling
    assert tiling.subgroup == old["sg"]


NONE = [None, [], {"rows": 0}, {"rows": -1}, {"rows": "8"}, {"rows": True}, {"rows": 1 << 40}, {"depth": 1}]


@pytest.mark.parametrize("value", [*NONE, {"family": 3}, {"wide": 1}, {"sg": 8, "lanes": 0}])
def test_what_is_no_tiling_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="a tiling"):
        Tiling.from_json(value)


@pytest.mark.drivers
def test_small_probabilities_are_not_lost(device: Device) -> None:
    """Each is less than the rounding of the sum that the largest one is in."""
    rows, cols = 3, 8192
    logits = np.full((rows, cols), -17, np.float32)
    logits[range(rows), [0, 1, 8000]] = 0
    arrays = {
        "logits": logits, "targets": np.zeros(rows, np.uint32), "count": np.array([rows], np.uint32),
        "state": np.zeros((rows, 4), np.float32), "rescale": np.zeros(rows, np.float32),
    }  # fmt: skip
    expected = 1 + (cols - 1) * np.exp(-17.0)
    for tiling in softmax_chunk.tilings(device.capabilities, {}):
        single = SingleKernel(device, softmax_chunk, arrays, {"rows": rows, "cols": cols, "first": 0}, tiling)
        single.run()
        assert single.read("state")[:, 1] == pytest.approx([expected] * rows, rel=3e-7), tiling
        single.free()
