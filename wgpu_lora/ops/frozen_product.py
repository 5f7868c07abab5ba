"""The product with frozen matrices of any format, in one dispatch that also adds LoRA's second product."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from wgpu_lora.gpu.kernel import Kernel
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.half_precision import gradient_operand, matmul_operand
from wgpu_lora.ops.lora import LowRank, backward_constants, forward_constants, tensors_of
from wgpu_lora.ops.matrix_stack import sizes_of
from wgpu_lora.ops.recorder import Recorder

BINDINGS = 8  # storage buffers of a kernel that WebGPU guarantees


@dataclass(frozen=True)
class FrozenProduct:
    """The products with matrices [out, in_features] that are stored together, of these numbers of rows.

    y, dy and the bias are flat if there are several matrices: the regions of all (see ops.matrix_stack).

    kernel, gradient: the format's kernels; their bindings are named as those of `ops.matmul`, and W's as in `tensors`.
    tensors: of W, by name; recorded when they are first used. constants: of the format.
    """

    outs: tuple[int, ...]
    in_features: int
    kernel: Kernel
    gradient: Kernel
    tensors: Callable[[Recorder], Mapping[str, Tensor]]
    constants: Mapping[str, Any]

    def adds(self, rec: Recorder, bias: bool) -> bool:
        """Whether the forward product adds LoRA's: its kernel has no more bindings than WebGPU guarantees."""
        weights = len(self.kernel.bindings.keys() - {"a", "y", "bias", "count", "a_scale", "h", "factor", "ranges"})
        return 5 + weights + bias + (rec.compute_dtype == "f16") <= BINDINGS

    def forward(
        self,
        rec: Recorder,
        x: Tensor,
        y: Tensor,
        bias: Tensor | None,
        accumulate: bool,
        low: LowRank | None,
        gated: bool = False,
    ) -> None:
        """y (+)= x W^T (+ bias) (+ low); gated: y = silu of the first matrix's columns times those of the second."""
        a, scale, kind = matmul_operand(rec, x, self.in_features, keep=True)
        shape = {"m": x.size // self.in_features, "k": self.in_features, **sizes_of("n", self.outs), "gated": gated}
        tensors = {"a": a, "y": y, "bias": bias, "a_scale": scale}
        self._dispatch(rec, self.kernel, tensors, low, accumulate, {**shape, "a_type": kind, **forward_constants(low)})

    def backward(self, rec: Recorder, dy: Tensor, dx: Tensor, accumulate: bool, low: LowRank | None) -> None:
        """dx (+)= dy W (+ low), summed over the matrices."""
        a, scale, kind = gradient_operand(rec, dy, self.outs)
        shape = {"m": dx.size // self.in_features, "n": self.in_features, **sizes_of("k", self.outs)}
        tensors = {"a": a, "y": dx, "a_scale": scale}
        constants = {**shape, "a_type": kind, **backward_constants(low)}
        self._dispatch(rec, self.gradient, tensors, low, accumulate, constants)

    def _dispatch(
        self,
        rec: Recorder,
        kernel: Kernel,
        tensors: Mapping[str, Tensor | None],
        low: LowRank | None,
        accumulate: bool,
        constants: Mapping[str, Any],
    ) -> None:
        adapter = dict(zip(("h", "factor", "ranges"), tensors_of(low), strict=False))
        by_name = {**tensors, **self.tensors(rec), **adapter}
        bound = [by_name.get(name) for name in kernel.bindings]
        rec.dispatch(kernel, *bound, accumulate=accumulate, **constants, **self.constants)
