"""Rotary position embedding (Su et al. 2021) in the half-split form of Hugging Face checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import F32, U32, Fixed, Flag, In, InOut, kernel, one_per
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.recorder import Recorder


@kernel("rope.wgsl", grid=lambda c: one_per(c.rows * c.heads * (c.dim // 2)), lib=("linear",))
def rope_rotate(
    x: In,
    positions: Fixed,
    table: Fixed,
    y: InOut,
    *,
    rows: U32,
    heads: U32,
    dim: U32,
    sign: F32 = 1.0,
    accumulate: Flag = False,
) -> Any:
    """y (+)= x with each pair (i, i + dim/2) rotated by sign * its angle at the row's position."""
    angle = table.reshape(-1, dim // 2, 2)[positions.astype(int)]
    cos, sin = angle[:, None, :, 0], sign * angle[:, None, :, 1]
    a, b = np.split(x.reshape(rows, heads, dim), 2, axis=2)
    turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2).reshape(y.shape)
    return y + turned if accumulate else turned


def rope(rec: Recorder, x: Tensor, positions: Tensor, table: Tensor, dim: int) -> Tensor:
    """Rotates x [T, heads, dim]. positions: u32 [T]. table: f32 [positions, dim / 2, 2], cos and sin."""
    rows = positions.size
    shape = {"rows": rows, "heads": x.size // (rows * dim), "dim": dim}
    y = rec.temp(x.shape, name="rotated")
    rec.dispatch(rope_rotate, x, positions, table, y, **shape)

    def backward() -> None:
        dx, accumulate = rec.gradient_target(x)
        rec.dispatch(rope_rotate, rec.gradient(y), positions, table, dx, sign=-1.0, accumulate=accumulate, **shape)

    rec.node(backward, inputs=[x], outputs=[y])
    return y
