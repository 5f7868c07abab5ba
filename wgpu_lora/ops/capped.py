"""Logits of a head, with a soft cap if the model has one: cap tanh(logits / cap), as in Gemma 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import F32, U32, In, InOut, Out, kernel, one_per
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.embedding import Table
from wgpu_lora.ops.matmul import matmul_nt

Dispatch = Callable[..., None]


@kernel("cap_logits.wgsl", grid=lambda c: one_per(c.size), lib=("linear", "tanh"))
def cap_logits(logits: InOut, *, size: U32, cap: F32) -> Any:
    """logits = cap tanh(logits / cap)."""
    return cap * np.tanh(logits / cap)


@kernel("cap_gradient.wgsl", grid=lambda c: one_per(c.size), lib=("linear",))
def cap_gradient(x: In, logits: In, y: Out, *, size: U32, cap: F32) -> Any:
    """y = x (1 - (logits / cap)^2): the derivatives x by capped logits, by those before the cap."""
    return np.where(x == 0, 0.0, x * (1 - (logits / cap) ** 2))


def head_logits(
    dispatch: Dispatch, x: Tensor, head: Table, part: Tensor, logits: Tensor, count: Tensor | None = None
) -> None:
    """Records logits [T, rows of the part] of hidden states x [T, in] by a part of the LM head (`Table.chunks`).

    Args:
        dispatch: of a program or a recorder.
        count: u32 [1], the rows of x that are used.
    """
    rows = x.size // head.in_features
    shape = {"m": rows, "n": part.shape[0], "k": head.in_features, "b_type": head.dtype}
    if count is None:
        dispatch(matmul_nt, x, part, logits, **shape)
    else:
        dispatch(matmul_nt, x, part, logits, None, count, **shape)
    if head.cap:
        dispatch(cap_logits, logits, size=logits.size, cap=head.cap)
