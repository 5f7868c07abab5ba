"""Inputs for every kernel: shapes that are awkward in several ways at once, and few, because each is a compilation.

The first case of a kernel is its core case: other drivers and the bounds-checked mode run that one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import Kernel, Tiles, cdiv
from wgpu_lora.ops import attention, elementwise, embedding, loss, matmul, norm, optimizer, rope, weights
from wgpu_lora.quant import kernels as quant
from wgpu_lora.quant.nf4 import DYNAMIC_CODE

Arrays = dict[str, np.ndarray]
NONE = 0xFFFFFFFF


@dataclass(frozen=True)
class Case:
    """One call of a kernel. Outputs in the arrays are what they hold before it.

    spared: tiles -> first row of an output that its tiling leaves alone although the reference computes it.
    vague: outputs -> places whose value nobody may rely on.
    """

    kernel: Kernel
    make: Callable[[np.random.Generator], Arrays]
    constants: dict[str, Any]
    spared: Callable[[Tiles], int] | None = None
    vague: dict[str, np.ndarray] = field(default_factory=dict)
    slow: bool = False  # to compile: one tiling is enough

    @property
    def label(self) -> str:
        parts = [f"{n}{v}" if type(v) is int else n if v is True else v for n, v in self.constants.items() if v]
        return "-".join([self.kernel.name, *(p for p in parts if isinstance(p, str))])

    def outputs(self, arrays: Arrays) -> list[str]:
        return [name for name in self.kernel.outputs if name in arrays]


CASES: dict[str, list[Case]] = defaultdict(list)


def add(kernel: Kernel, make: Callable[[np.random.Generator], Arrays], spared: Any = None, vague: Any = None, slow: bool = False, **constants: Any) -> None:
    CASES[kernel.name].append(Case(kernel, make, constants, spared, vague or {}, slow))


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def poison(*shape: int, value: float = np.nan) -> np.ndarray:
    return np.full(shape, value, np.float32)


def stored(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    """Normal values as they are stored on the device; bf16 by truncation."""
    values = normal(rng, *shape)
    if dtype == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16) if dtype == "f16" else values


def widened(array: np.ndarray) -> np.ndarray:
    """What a float64 reference gets."""
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def u32(*values: Any) -> np.ndarray:
    return np.array(values, np.uint32)


# -- matrix products ---------------------------------------------------------------------------------------------------


def product(kernel: Kernel, m: int, n: int, k: int, *, bias: bool = False, row_scale: bool = False, count: int = 0, **flags: Any) -> None:
    def make(rng: np.random.Generator) -> Arrays:
        arrays = {"a": normal(rng, m, k), "y": normal(rng, m, n)}
        if "codes" in kernel.bindings:  # what lies in the nibbles past the last column must not matter
            out, size_in = (n, k) if kernel is matmul.nf4_matmul else (k, n)
            arrays["codes"] = rng.integers(0, 2**32, (cdiv(size_in, 8), out), np.uint32)
            arrays["scales"] = rng.random(cdiv(out * size_in, 64), np.float32) + 0.5
        else:
            arrays["b"] = stored(rng, flags.get("b_type", "f32"), *((n, k) if kernel is matmul.matmul_nt else (k, n)))
        if bias:
            arrays["bias"] = normal(rng, n)
        if row_scale:
            arrays["row_scale"] = normal(rng, m)
        if count:
            arrays["count"] = u32(count)
        return arrays

    spared = (lambda tiles: cdiv(count, tiles["rows"]) * tiles["rows"]) if count else None
    add(kernel, make, spared, m=m, n=n, k=k, **flags)


product(matmul.matmul_nt, 37, 131, 52, bias=True)
product(matmul.matmul_nt, 1, 5, 7, accumulate=True)
product(matmul.matmul_nt, 41, 67, 36, count=9, b_type="bf16")
product(matmul.matmul_nt, 17, 35, 9, bias=True, accumulate=True, b_type="f16")
product(matmul.matmul_nn, 41, 131, 52, row_scale=True, count=9)
product(matmul.matmul_nn, 19, 70, 13, accumulate=True, b_type="bf16")
product(matmul.matmul_nn, 3, 2, 5, row_scale=True, b_type="f16")
product(matmul.matmul_nn, 9, 35, 10, b_type="bf16")
product(matmul.nf4_matmul, 37, 131, 128, bias=True)
product(matmul.nf4_matmul, 5, 19, 72, accumulate=True)
product(matmul.nf4_matmul, 9, 67, 13)
product(matmul.nf4_matmul, 2, 5, 20, bias=True, accumulate=True)
product(matmul.nf4_matmul_backward, 19, 136, 37, accumulate=True)
product(matmul.nf4_matmul_backward, 9, 67, 20)
product(matmul.nf4_matmul_backward, 1, 5, 3, accumulate=True)

SLOTS = u32((2, 9), (9, 9), (11, 27))  # an empty slot, and rows of no slot before, between and after
SLOT_ROWS = 29


def unslotted(array: np.ndarray) -> np.ndarray:
    """Rows of no slot may hold anything."""
    array[[0, 1, 9, 10, 27, 28]] = np.nan
    return array


def lora(kernel: Kernel, n: int, k: int, padding: int = 0, scale: bool = False, **flags: Any) -> None:
    def make(rng: np.random.Generator) -> Arrays:
        b = normal(rng, 3, n * k + padding)
        arrays = {"a": unslotted(normal(rng, SLOT_ROWS, k)), "b": b, "y": normal(rng, SLOT_ROWS, n), "ranges": SLOTS}
        return {**arrays, "scale": normal(rng, 3)} if scale else arrays

    add(kernel, make, m=SLOT_ROWS, n=n, k=k, slots=3, stride=n * k + padding, **flags)


def lora_gradient(m: int, n: int, padding: int = 0, **flags: Any) -> None:
    def make(rng: np.random.Generator) -> Arrays:
        a, b = unslotted(normal(rng, SLOT_ROWS, m)), unslotted(normal(rng, SLOT_ROWS, n))
        return {"a": a, "b": b, "y": normal(rng, 3, m * n + padding), "ranges": SLOTS}

    add(matmul.lora_tn, make, m=m, n=n, k=SLOT_ROWS, slots=3, stride=m * n + padding, **flags)


lora(matmul.lora_nt, 7, 52, padding=36, scale=True)
lora(matmul.lora_nt, 67, 5, accumulate=True)
lora(matmul.lora_nn, 7, 51, padding=11, scale=True, accumulate=True)
lora(matmul.lora_nn, 67, 8)
lora_gradient(20, 67, padding=36)
lora_gradient(7, 9, accumulate=False)

# -- attention ---------------------------------------------------------------------------------------------------------


def packed(*segments: int, window: int = NONE) -> np.ndarray:
    """Ranges of segments that follow each other, each row seeing the last `window` keys of its own."""
    rows, start = [], 0
    for length in segments:
        stop = start + length
        rows += [(max(start, t + 1 - window), t + 1, min(stop, t + window), 0) for t in range(start, stop)]
        start = stop
    return u32(*rows)


def cached(rows: int, keys: int, window: int = NONE) -> np.ndarray:
    """The last `rows` queries over a cache of `keys`; the first of them sees nothing."""
    seen = [(max(0, t + 1 - window), t + 1, 0, 0) for t in range(keys - rows, keys)]
    return u32((5, 5, 0, 0), *seen[1:])


def attend(ranges: np.ndarray, keys: int, kv_heads: int, group: int, dim: int, backward: bool = True) -> None:
    rows = len(ranges)
    shape = {"rows": rows, "kv_heads": kv_heads, "group": group, "dim": dim, "scale": dim**-0.5}
    q_shape, k_shape = (rows, kv_heads * group, dim), (keys, kv_heads, dim)

    def common(rng: np.random.Generator) -> Arrays:
        return {"q": normal(rng, *q_shape), "k": normal(rng, *k_shape), "v": normal(rng, *k_shape), "ranges": ranges}

    def forward(rng: np.random.Generator) -> Arrays:
        return {**common(rng), "y": poison(*q_shape), "lse": poison(*q_shape[:2])}

    def gradients(rng: np.random.Generator, *names: str) -> Arrays:
        arrays = {**common(rng), "dy": normal(rng, *q_shape)}
        wide = {n: widened(arrays[n]) for n in ("q", "k", "v", "ranges")}
        y, lse = attention.attention_forward(**wide, y=None, lse=None, keys=keys, **shape)
        delta = (y.reshape(q_shape) * arrays["dy"]).sum(axis=2)
        stats = np.stack([lse.reshape(q_shape[:2]), delta], axis=2).astype(np.float32)
        return {**arrays, "stats": stats, **{n: poison(*(q_shape if n == "dq" else k_shape)) for n in names}}

    blind = np.repeat((ranges[:, 0] == ranges[:, 1])[:, None], kv_heads * group, axis=1)
    slow = dim >= 64
    add(attention.attention_forward, forward, vague={"lse": blind}, slow=slow, keys=keys, **shape)
    add(attention.attention_backward_q, lambda rng: gradients(rng, "dq"), slow=slow, keys=keys, **shape)
    if backward:
        add(attention.attention_backward_kv, lambda rng: gradients(rng, "dk", "dv"), slow=slow, **shape)


attend(packed(5, 1, 20, 11), 37, kv_heads=2, group=3, dim=10)
attend(packed(19, window=4), 19, kv_heads=1, group=4, dim=64)
attend(packed(7, 16, window=3), 23, kv_heads=3, group=1, dim=20)
attend(packed(2, 1, window=2), 3, kv_heads=1, group=2, dim=4)
attend(cached(5, 37, window=30), 37, kv_heads=2, group=2, dim=6, backward=False)
add(
    attention.attention_stats,
    lambda rng: {"y": normal(rng, 67, 10), "dy": normal(rng, 67, 10), "lse": normal(rng, 67), "stats": poison(67, 2)},
    rows=67,
    dim=10,
)

# -- row by row --------------------------------------------------------------------------------------------------------


def normalise(rows: int, cols: int, accumulate: bool) -> None:
    def forward(rng: np.random.Generator) -> Arrays:
        return {"x": normal(rng, rows, cols), "weight": normal(rng, cols), "y": poison(rows, cols), "rstd": poison(rows)}

    def backward(rng: np.random.Generator) -> Arrays:
        rstd = rng.random(rows, np.float32) + 0.5
        return {**forward(rng), "rstd": rstd, "dy": normal(rng, rows, cols), "dx": normal(rng, rows, cols)}

    add(norm.rmsnorm_forward, forward, rows=rows, cols=cols, eps=1e-6)
    add(norm.rmsnorm_backward, lambda rng: {n: a for n, a in backward(rng).items() if n != "y"}, rows=rows, cols=cols, accumulate=accumulate)


normalise(67, 37, True)
normalise(32771, 3, False)  # more rows than a grid has in one dimension


def softmax(first: int, rows: int = 67, cols: int = 37, count: int = 61) -> None:
    def make(rng: np.random.Generator) -> Arrays:
        state = normal(rng, rows, 4) ** 2 if first else poison(rows, 4)
        targets = rng.integers(0, first + 2 * cols, rows, np.uint32)
        return {"logits": 5 * normal(rng, rows, cols), "targets": targets, "count": u32(count), "state": state, "rescale": normal(rng, rows)}

    add(loss.softmax_chunk, make, rows=rows, cols=cols, first=first)


softmax(first=37)
softmax(first=0)


def finish(gradient: bool, rows: int = 67, cols: int = 37) -> None:
    def make(rng: np.random.Generator) -> Arrays:
        state, weight, dh = normal(rng, rows, 4) ** 2 + 0.1, normal(rng, rows), normal(rng, rows, cols)
        weight[::3], state[::3], dh[::3] = 0, np.nan, np.nan
        arrays = {"state": state.astype(np.float32), "weight": weight, "loss": poison(rows)}
        return {**arrays, "head_rows": normal(rng, rows, cols), "dh": dh} if gradient else arrays

    add(loss.loss_finish, make, rows=rows, cols=cols)


finish(True)
finish(False)
add(loss.sum_by_slot, lambda rng: {"x": unslotted(normal(rng, SLOT_ROWS)), "ranges": SLOTS, "total": normal(rng, 3)}, slots=3)
add(optimizer.square_sums, lambda rng: {"x": normal(rng, 67 * optimizer.BLOCK), "sums": poison(67)}, blocks=67)

HYPER_SLOTS = 5  # usual, of no block, unlimited norm, inactive, of a loss that is not finite


def hypers(rng: np.random.Generator) -> np.ndarray:
    records = rng.random((HYPER_SLOTS, optimizer.HYPER_FIELDS), np.float32) * 0.5 + 0.25
    records[:, [3, 7, 8]] = 1e-8, 1.0, 1.0
    records[2, 7], records[3, 8] = 0, 0
    return records


def norms(rng: np.random.Generator) -> Arrays:
    block_slots = u32(*rng.choice([0, 2, 3, 4, NONE], 37))
    slot_loss = normal(rng, HYPER_SLOTS)
    slot_loss[4] = np.nan
    report = poison(HYPER_SLOTS, 4, value=7e29)  # a NaN is expected in places
    return {"sums": rng.random(37, np.float32), "block_slots": block_slots, "hyper": hypers(rng), "loss": slot_loss, "report": report}


def updates(rng: np.random.Generator) -> Arrays:
    block_slots, size = u32(0, NONE, 3, 2, 0, 4), 6 * optimizer.BLOCK - 37
    report = normal(rng, HYPER_SLOTS, 4)
    report[:, 2] = 1, 1, 1, 0, 0
    values = {name: normal(rng, size) for name in ("params", "grads", "first_moment", "second_moment")}
    values["grads"][2 * optimizer.BLOCK : 3 * optimizer.BLOCK] = np.nan
    values["second_moment"] **= 2
    return {**values, "block_slots": block_slots, "hyper": hypers(rng), "report": report}


add(optimizer.gradient_norm, norms, slots=HYPER_SLOTS, blocks=37)
add(optimizer.adamw, updates, size=6 * optimizer.BLOCK - 37)

# -- elements ----------------------------------------------------------------------------------------------------------


def several(rng: np.random.Generator, size: int, inputs: str, outputs: str) -> Arrays:
    return {**{n: 3 * normal(rng, size) for n in inputs.split()}, **{n: poison(size) for n in outputs.split()}}


for one, inputs, outputs in (
    (elementwise.swiglu_forward, "gate up", "y"),
    (elementwise.swiglu_backward, "gate up dy", "dgate dup"),
    (elementwise.add_forward, "a b", "y"),
):
    add(one, lambda rng, i=inputs, o=outputs: several(rng, 4 * 64 + 37, i, o), size=4 * 64 + 37)
add(elementwise.fill, lambda rng: {"y": poison(67)}, size=67, value=-1.5e-6)
add(elementwise.fill, lambda rng: {"y": poison(32768 * 64 + 67)}, size=32768 * 64 + 67, value=3.0)


def drop(rows: int, cols: int, **flags: Any) -> None:
    def make(rng: np.random.Generator) -> Arrays:
        draws = rng.integers(0, 2**32, (rows, 4), np.uint32)
        p = rng.choice([0, 0.1, 0.5, 0.97], rows)  # each row belongs to a slot with a rate of its own
        draws[:, 2], draws[:, 3] = p * 2**32, (1 / (1 - p)).astype(np.float32).view(np.uint32)
        return {"x": normal(rng, rows, cols), "draws": draws, "y": normal(rng, rows, cols)}

    add(elementwise.dropout_apply, make, rows=rows, cols=cols, **flags)


drop(29, 37, module=5, accumulate=True)
drop(7, 64, module=4_000_000_000)


def rotate(rows: int, heads: int, dim: int, **flags: Any) -> None:
    def make(rng: np.random.Generator) -> Arrays:
        angle = rng.random((11, dim // 2)) * 100
        table = np.stack([np.cos(angle), np.sin(angle)], axis=2).astype(np.float32)
        positions = rng.integers(0, 11, rows, np.uint32)
        return {"x": normal(rng, rows, heads, dim), "positions": positions, "table": table, "y": normal(rng, rows, heads, dim)}

    add(rope.rope_rotate, make, rows=rows, heads=heads, dim=dim, **flags)


rotate(13, 3, 10, sign=-1.0, accumulate=True)
rotate(1, 1, 64)

# -- tables and codes --------------------------------------------------------------------------------------------------


def table(b_type: str, rows: int = 29, cols: int = 7, first: int = 3, count: int = 5) -> None:
    def make(rng: np.random.Generator) -> Arrays:
        ids = rng.integers(0, first + count + 3, rows, np.uint32)
        return {"ids": ids, "table": stored(rng, b_type, count, cols), "y": normal(rng, rows, cols)}

    add(embedding.embedding_rows, make, rows=rows, cols=cols, first=first, count=count, b_type=b_type)


def some_rows(rng: np.random.Generator, rows: int, of: int) -> np.ndarray:
    return np.where(rng.random(rows) < 0.3, NONE, rng.permutation(of)[:rows]).astype(np.uint32)


add(embedding.gather_rows, lambda rng: {"x": normal(rng, 41, 7), "rows_of": some_rows(rng, 29, 41), "y": normal(rng, 29, 7)}, rows=29, cols=7)
add(embedding.scatter_rows, lambda rng: {"x": normal(rng, 29, 7), "rows_of": some_rows(rng, 29, 41), "y": normal(rng, 41, 7)}, rows=29, cols=7)
add(
    weights.nf4_scales,
    lambda rng: {"absmax_codes": rng.integers(0, 256, 523, np.uint8), "nested": normal(rng, 4), "dynamic": DYNAMIC_CODE, "scales": poison(523)},
    blocks=523,
)


def absmax_of(w: np.ndarray) -> np.ndarray:
    return quant.nf4_absmax(widened(w), None, size=w.size).astype(np.float32)


def encode(b_type: str, rows: int, size_in: int, first: int, out: int) -> None:
    def make(rng: np.random.Generator) -> Arrays:
        w = stored(rng, b_type, rows, size_in)
        w.reshape(-1)[64:128] = 0  # a block of zeros
        codes = rng.integers(0, 2**32, (cdiv(size_in, 8), out), np.uint32)
        return {"w": w, "absmax": absmax_of(w), "codes": codes}

    add(quant.nf4_encode, make, rows=rows, first=first, out=out, size_in=size_in, b_type=b_type)


for kind, size in (("f32", 64 * 67 + 13), ("bf16", 5), ("f16", 64 * 3 + 1)):
    table(kind)
    add(quant.nf4_absmax, lambda rng, n=size, t=kind: {"w": stored(rng, t, n), "absmax": poison(cdiv(n, 64))}, size=size, b_type=kind)
encode("f32", rows=64, size_in=13, first=3, out=71)
encode("bf16", rows=7, size_in=64, first=0, out=7)
encode("f16", rows=64, size_in=21, first=64, out=129)
