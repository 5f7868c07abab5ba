"""Stacks: up to three frozen matrices that are multiplied with the same x in one dispatch, and their gradient by x too.

The parts of a stack, such as q, k and v, are regions of one storage: those of y, of the matrix's tensors and of the
bias begin at multiples of 256 bytes (`Recorder.temps`, `gpu.tensor.share_storage`), so that each is a tensor. LoRA's
A of all parts are one matrix [parts * rank, in]; the B [out, rank] of each begin at whole blocks of the optimizer.

With `gated`, there are two parts of the same size, and y is silu of the first times the second, [m, n] (Shazeer 2020).

Forward, the sizes n, n1 and n2 are the columns of the parts; backward, k, k1 and k2 are the steps of the contraction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wgpu_lora.gpu.tensor import ALIGNMENT

PARTS = 3  # at most
ALL_PARTS = "1" * PARTS  # of a stack's parts, which have an adapter
FACTOR_BLOCK = 1024  # values; `ops.gradient_norm.BLOCK`


def region(values: int, item_bytes: int = 4) -> int:
    """The values from the start of a part to that of the next."""
    alignment = ALIGNMENT // item_bytes
    return -(-values // alignment) * alignment


def factor_region(values: int) -> int:
    return -(-values // FACTOR_BLOCK) * FACTOR_BLOCK


def sizes(c: Mapping[str, Any], name: str) -> list[int]:
    """The sizes of the parts: n, n1, n2 or k, k1, k2."""
    return [size for size in (c[name], c.get(f"{name}1", 0), c.get(f"{name}2", 0)) if size]


def sizes_of(name: str, parts: Sequence[int]) -> dict[str, Any]:
    """The constants of a call: `name` of its only part, or of a stack's parts."""
    return {**dict(zip((name, f"{name}1", f"{name}2"), parts, strict=False)), "stacked": len(parts) > 1}


def split(array: np.ndarray, counts: Sequence[int], item_bytes: int = 4) -> list[np.ndarray]:
    """Views of the parts of a flat array, which have `counts` values."""
    flat, first, result = array.reshape(-1), 0, []
    for count in counts:
        result.append(flat[first : first + count])
        first += region(count, item_bytes)
    return result


def join(parts: Sequence[np.ndarray], item_bytes: int = 4) -> np.ndarray:
    """Flat arrays as the regions of one, with zeros between: the inverse of `split`."""
    whole = np.zeros(sum(region(part.size, item_bytes) for part in parts), parts[0].dtype)
    for view, part in zip(split(whole, [part.size for part in parts], item_bytes), parts, strict=True):
        view[:] = part.reshape(-1)
    return whole


def forward_reference(kernel: Any, arrays: dict[str, Any], c: dict[str, Any], of_b: Mapping[str, Any]) -> np.ndarray:
    """The reference of a stack's forward product: that of each part. of_b: b's tensors -> (sizes, item bytes)."""
    ns, m, rank = sizes(c, "n"), c["m"], c["rank"]
    if c["gated"]:
        y = np.zeros(sum(region(m * n) for n in ns))
        gate, up = split(
            forward_reference(kernel, {**arrays, "y": y}, {**c, "gated": False}, of_b), [m * n for n in ns]
        )
        value: np.ndarray = gate / (1 + np.exp(-gate)) * up
        return value.reshape(m, ns[0])
    result: np.ndarray = arrays["y"].reshape(-1).copy()
    views = {"y": split(result, [m * n for n in ns])}
    views |= {name: split(arrays[name], counts, size) for name, (counts, size) in of_b.items()}
    if arrays.get("bias") is not None:
        views["bias"] = split(arrays["bias"], ns)
    h_first, factor_first = c["h_first"], 0
    for p, n in enumerate(ns):
        own = {**arrays, **{name: parts[p] for name, parts in views.items()}}
        constants = {**c, "n": n, "n1": 0, "n2": 0, "stacked": False, "h_first": h_first}
        if arrays.get("factor") is not None and c["adapted_parts"][p] == "1":
            own["factor"] = arrays["factor"].reshape(-1)[factor_first:]
            h_first, factor_first = h_first + rank, factor_first + factor_region(n * rank)
        else:
            own["factor"] = None
        views["y"][p][:] = kernel(**own, **constants).reshape(-1)
    return result


def backward_reference(kernel: Any, arrays: dict[str, Any], c: dict[str, Any], of_b: Mapping[str, Any]) -> Any:
    """The reference of a stack's backward product: the sum of those of the parts. of_b: as in `forward_reference`."""
    ks = sizes(c, "k")
    views = {"a": split(arrays["a"], [c["m"] * k for k in ks])}
    views |= {name: split(arrays[name], counts, size) for name, (counts, size) in of_b.items()}
    y = arrays["y"]
    for p, k in enumerate(ks):
        own = {**arrays, **{name: parts[p] for name, parts in views.items()}, "y": y}
        if p:
            own |= {"factor": None, "row_scale": None} if "row_scale" in own else {"factor": None}
        constants = {**c, "k": k, "k1": 0, "k2": 0, "stacked": False, "accumulate": p > 0 or c["accumulate"]}
        y = kernel(**own, **constants)
    return y
