"""Frozen matrices of any format, and their product in one dispatch that also adds LoRA's second product."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from wgpu_lora.gpu.kernel import Kernel
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.half_precision import gradient_operand, matmul_operand
from wgpu_lora.ops.linear.lora import LowRank, backward_constants, forward_constants, tensors_of
from wgpu_lora.ops.matmul.matrix_stack import sizes_of
from wgpu_lora.ops.recorder import Recorder

BINDINGS = 8  # storage buffers of a kernel that WebGPU guarantees


class FrozenMatrix:
    """W [out_features, in_features], frozen. A format has a `product`, or `forward` and `backward` of its own.

    trains: whether constants of its own are trained, so that it has `record_gradients`.
    """

    out_features: int
    in_features: int
    trains: ClassVar[bool] = False

    def product(self, siblings: Sequence[FrozenMatrix]) -> FrozenProduct | None:
        """The product with this matrix and others that are stored with it; None if it takes several dispatches."""
        return None

    def forward(self, rec: Recorder, x: Tensor, y: Tensor, bias: Tensor | None, accumulate: bool) -> None:
        """y (+)= x W^T (+ bias)."""
        self._own_product().forward(rec, x, y, bias, accumulate, None)

    def backward(self, rec: Recorder, dy: Tensor, dx: Tensor, accumulate: bool) -> None:
        """dx (+)= dy W."""
        self._own_product().backward(rec, dy, dx, accumulate, None)

    def _own_product(self) -> FrozenProduct:
        product = self.product(())
        assert product is not None, "a format without a product has a forward and a backward pass of its own"
        return product

    def block(self, start: int) -> FrozenMatrix:
        """The same matrix for a block of rows of x that begins at the batch's row `start`."""
        return self

    def record_gradients(self, rec: Recorder, x: Tensor, dy: Tensor) -> None:
        """Adds to the gradients of what is trained of it, from y = x W^T."""
        raise NotImplementedError


@dataclass(frozen=True)
class FrozenProduct:
    """The products with matrices [out, in_features] that are stored together, of these numbers of rows.

    y, dy and the bias are flat if there are several matrices: the regions of all (see ops.matmul.matrix_stack).

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
        low_rank: LowRank | None,
        gated: bool = False,
    ) -> None:
        """y (+)= x W^T (+ bias) (+ low_rank); gated: y = silu of the first matrix's columns times the second's."""
        a, scale, kind = matmul_operand(rec, x, self.in_features, keep=True)
        shape = {"m": x.size // self.in_features, "k": self.in_features, **sizes_of("n", self.outs), "gated": gated}
        tensors = {"a": a, "y": y, "bias": bias, "a_scale": scale}
        self._dispatch(
            rec, self.kernel, tensors, low_rank, accumulate, {**shape, "a_type": kind, **forward_constants(low_rank)}
        )

    def backward(self, rec: Recorder, dy: Tensor, dx: Tensor, accumulate: bool, low_rank: LowRank | None) -> None:
        """dx (+)= dy W (+ low_rank), summed over the matrices."""
        a, scale, kind = gradient_operand(rec, dy, self.outs)
        shape = {"m": dx.size // self.in_features, "n": self.in_features, **sizes_of("k", self.outs)}
        tensors = {"a": a, "y": dx, "a_scale": scale}
        constants = {**shape, "a_type": kind, **backward_constants(low_rank)}
        self._dispatch(rec, self.gradient, tensors, low_rank, accumulate, constants)

    def _dispatch(
        self,
        rec: Recorder,
        kernel: Kernel,
        tensors: Mapping[str, Tensor | None],
        low_rank: LowRank | None,
        accumulate: bool,
        constants: Mapping[str, Any],
    ) -> None:
        adapter = dict(zip(("h", "factor", "ranges"), tensors_of(low_rank), strict=False))
        by_name = {**tensors, **self.tensors(rec), **adapter}
        bound = [by_name.get(name) for name in kernel.bindings]
        rec.dispatch(kernel, *bound, accumulate=accumulate, **constants, **self.constants)
