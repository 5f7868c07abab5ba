"""Parts of calls: what the reference makes of a part is that part of what it makes of the whole."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import numpy as np
import pytest
import support.kernels
from support.kernels import CASES, Case
from support.sampling import sample

from wgpu_lora.gpu import reference_values
from wgpu_lora.gpu.kernel import REGISTRY
from wgpu_lora.gpu.reference_values import as_float64
from wgpu_lora.ops.attention.attention import attention_backward_kv, attention_backward_q, attention_forward
from wgpu_lora.ops.embedding import embedding_rows
from wgpu_lora.ops.gradient_norm import BLOCK, square_sums
from wgpu_lora.ops.matmul.matmul import matmul_nn, matmul_nt
from wgpu_lora.weights.nf4.nf4_products import nf4_matmul, nf4_matmul_backward

Arrays = dict[str, np.ndarray]
OPTIONAL = {"bias", "count", "a_scale", "row_scale"}


@pytest.fixture(autouse=True)
def everything_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PRODUCTS": 0, "VALUES": 0, "ROWS": 3, "COLUMN_BLOCKS": 2, "PAGE_BLOCKS": 3}.items():
        monkeypatch.setattr(reference_values, name, value)


def result(kernel: Any, arrays: Arrays, constants: dict[str, Any]) -> Arrays:
    """The arrays, with what the reference writes."""
    output = kernel(**{n: as_float64(arrays[n]) if n in arrays else None for n in kernel.bindings}, **constants)
    outputs = [n for n in kernel.outputs if n in arrays]
    values = output if isinstance(output, tuple) else (output,)
    return arrays | {n: np.asarray(v).reshape(arrays[n].shape) for n, v in zip(outputs, values, strict=True)}


def compare(kernel: Any, arrays: Arrays, constants: dict[str, Any]) -> dict[str, Any]:
    """Compare a part with the same part of the whole; returns the part's constants."""
    before, smaller = kernel.part(arrays, constants)
    after, _ = kernel.part(result(kernel, arrays, constants), constants)
    got = result(kernel, before, smaller)
    for name in kernel.outputs:
        if name in arrays:
            np.testing.assert_allclose(got[name].reshape(-1), after[name].reshape(-1), atol=1e-6, err_msg=name)
    return smaller


def product_constants(kernel: Any, rng: np.random.Generator) -> dict[str, Any]:
    c = {**kernel.defaults, "m": rng.integers(1, 9), "n": rng.choice([1, 2, 63, 64, 65, 130, 192, 257])}
    c |= {"k": rng.choice([1, 3, 8, 60, 64, 65, 128]), "accumulate": rng.integers(2) > 0}
    for operand in "ay" if "y_skip" in kernel.constants else "":
        c[f"{operand}_skip"] = skip = rng.integers(9)
        c[f"{operand}_first"] = rng.integers(skip + 1)
    if rng.integers(2):  # LoRA's product
        c |= {"rank": rng.integers(1, 5), "h_skip": 3, "h_first": rng.integers(4), "first_row": rng.integers(4)}
        c["stride"] = c["n"] * c["rank"] + rng.integers(5)
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in c.items()}


@pytest.mark.parametrize("kernel", [matmul_nt, matmul_nn, nf4_matmul, nf4_matmul_backward], ids=lambda k: k.name)
def test_products_of_any_size(kernel: Any, rng: np.random.Generator) -> None:
    """Ranges of wider rows, optional bindings, flat arrays, and a last block of columns that is shorter."""
    for _ in range(150):
        c = product_constants(kernel, rng)
        absent = {name for name in OPTIONAL if rng.integers(2)} | ({"row_scale"} if c.get("y_skip") else set())
        arrays = kernel.tuning.inputs(c, tuple(n for n in kernel.bindings if n not in absent), rng)
        if rng.integers(2):
            arrays |= {name: arrays[name].reshape(-1) for name in "ay"}
        smaller = compare(kernel, arrays, c)
        assert smaller["m"] == min(c["m"], 3)
        own_scales = "scales" not in arrays or (c["k"] if c["form"] == "nt" else c["n"]) % 64 == 0
        last = c["n"] % 64 or 64
        assert smaller["n"] == (min(c["n"], 64 + last) if own_scales else c["n"])


@pytest.mark.parametrize("kernel", [matmul_nt, matmul_nn, nf4_matmul, nf4_matmul_backward], ids=lambda k: k.name)
def test_stacks_of_any_size(kernel: Any, rng: np.random.Generator) -> None:
    """Some rows of every part, with the slots of these rows."""
    for _ in range(30):
        c = {**kernel.defaults, "m": int(rng.integers(1, 9)), "n": int(rng.integers(1, 99)), "k": 24, "stacked": True}
        c |= {name: int(rng.integers(1, 99)) for name in ("n1", "n2", "k1") if name in c}
        c |= {"rank": 3, "h_skip": 6, "stride": 4096, "first_row": 2}
        arrays = kernel.tuning.inputs(c, tuple(n for n in kernel.bindings if n not in ("row_scale", "count")), rng)
        assert compare(kernel, arrays, c)["m"] == min(c["m"], 3)


@pytest.mark.parametrize(
    "kernel", [attention_forward, attention_backward_q, attention_backward_kv], ids=lambda k: k.name
)
def test_attention_of_any_size(kernel: Any, rng: np.random.Generator) -> None:
    for _ in range(30):
        c = {"rows": int(rng.integers(1, 9)), "kv_heads": int(rng.integers(1, 4)), "group": int(rng.integers(1, 4))}
        c |= {"dim": 4, "scale": 0.5} | (
            {"keys": c["rows"] + int(rng.integers(5))} if "keys" in kernel.constants else {}
        )
        compare(kernel, kernel.tuning.inputs(c, tuple(kernel.bindings), rng), c)


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 11])
def test_pages_of_any_size(blocks: int, rng: np.random.Generator) -> None:
    arrays = {"x": rng.standard_normal(blocks * BLOCK), "sums": np.zeros(blocks)}
    if blocks <= 3:  # is compared as a whole
        assert square_sums.part is not None
        assert square_sums.part(arrays, {"blocks": blocks}) is None
    else:
        assert compare(square_sums, arrays, {"blocks": blocks})["blocks"] == 3


@pytest.mark.parametrize(("first", "count"), [(0, 40), (7, 5), (39, 1), (100, 3)])
def test_rows_that_nobody_asked_for_are_left_out(first: int, count: int, rng: np.random.Generator) -> None:
    ids = np.array([7, 39, 7, 0, 11, 40, 6], np.uint32)
    arrays = {"ids": ids, "b": rng.standard_normal((count, 4)), "y": rng.standard_normal((ids.size, 4))}
    smaller = compare(embedding_rows, arrays, {"rows": ids.size, "cols": 4, "first": first, "count": count})
    assert smaller["count"] <= min(count, ids.size + 1)


@pytest.mark.parametrize(("count", "limit"), [(1, 3), (3, 3), (4, 3), (1000, 32), (32, 32), (33, 32)])
def test_picks_are_spread_over_the_whole(count: int, limit: int) -> None:
    positions = reference_values.evenly_spaced(count, limit)
    assert (positions[0], positions[-1], positions.size) == (0, count - 1, min(count, limit))
    assert (np.diff(positions) > 0).all()
    assert count <= limit or np.diff(positions).max() <= -(-count // (limit - 1))


# -- all others, on their test cases -----------------------------------------------------------------------------------

for family in pkgutil.iter_modules(support.kernels.__path__, "support.kernels."):
    importlib.import_module(family.name)
CUT = [case for cases in CASES.values() for case in cases if case.kernel.part and not case.rare]


def test_every_kernel_has_a_case_that_is_cut(rng: np.random.Generator) -> None:
    kernels = {
        case.kernel.name for case in CUT if case.kernel.part(case.make(rng), {**case.kernel.defaults, **case.constants})
    }
    assert kernels == {kernel.name for kernel in REGISTRY.values() if kernel.part}


@pytest.mark.parametrize("case", sample(CUT, 1 / 5), ids=lambda case: case.label)
def test_cases(case: Case, rng: np.random.Generator) -> None:
    arrays, constants = case.make(rng), {**case.kernel.defaults, **case.constants}
    if case.kernel.part(arrays, constants):
        compare(case.kernel, arrays, constants)
