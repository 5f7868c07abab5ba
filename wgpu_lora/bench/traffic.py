"""Estimated memory traffic of a recorded program: what each dispatch reads and writes at least, once each.

On a GPU a decoding step takes as long as its bytes. Values that stay in a cache between dispatches are counted each
time, those that several workgroups read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from wgpu_lora.gpu.dispatch import Dispatch
from wgpu_lora.gpu.tensor import ITEM_BYTES, Tensor

# Values that a kernel uses of a tensor, where that is not all of it: (constants, rows that attention sees) -> values.
PARTS: dict[tuple[str, str], Callable[[dict[str, Any], int], int]] = {
    ("embedding_rows", "table"): lambda c, context: c["rows"] * c["cols"],
    ("gather_rows", "x"): lambda c, context: c["rows"] * c["cols"],
    ("rope_forward", "table"): lambda c, context: c["rows"] * c["rotated"],
    ("rope_forward", "cache_k"): lambda c, context: c["rows"] * c["kv_heads"] * c["dim"],
    ("rope_forward", "cache_v"): lambda c, context: c["rows"] * c["kv_heads"] * c["dim"],
    ("attention_forward", "k"): lambda c, context: context * c["kv_heads"] * c["dim"],
    ("attention_forward", "v"): lambda c, context: context * c["kv_heads"] * c["dim"],
}
WRITTEN_ONLY = frozenset({"cache_k", "cache_v"})


def dispatch_bytes(step: Dispatch, context: int) -> int:
    """Bytes that a dispatch reads and writes.

    Args:
        context: rows of all sequences' caches that attention sees.
    """
    return sum(_bytes(step, name, tensor, context) for name, tensor in zip(step.present, step.tensors, strict=True))


def program_bytes(steps: Iterable[Dispatch], context: int) -> int:
    return sum(dispatch_bytes(step, context) for step in steps)


def _bytes(step: Dispatch, name: str, tensor: Tensor, context: int) -> int:
    part = PARTS.get((step.kernel.name, name))
    nbytes = min(tensor.nbytes, part(step.constants, context) * ITEM_BYTES[tensor.dtype]) if part else tensor.nbytes
    updated = step.kernel.bindings[name] == "inout" and name not in WRITTEN_ONLY
    return 2 * nbytes if updated and step.constants.get("accumulate", True) else nbytes
