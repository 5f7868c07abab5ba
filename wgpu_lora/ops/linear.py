"""y = x W^T + scale (dropout(x) A^T) B^T: a frozen linear layer with LoRA adapters beside it (Hu et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.elementwise import dropout_apply, fill
from wgpu_lora.ops.matmul import lora_nn, lora_nt, lora_tn
from wgpu_lora.ops.recorder import Recorder


class FrozenMatrix(Protocol):
    """W [out_features, in_features], frozen."""

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    def forward(self, rec: Recorder, x: Tensor, y: Tensor, bias: Tensor | None, accumulate: bool) -> None:
        """y (+)= x W^T (+ bias)."""

    def backward(self, rec: Recorder, dy: Tensor, dx: Tensor, accumulate: bool) -> None:
        """dx (+)= dy W."""


@dataclass(frozen=True)
class LowRank:
    """LoRA's second product, added by the kernel of a frozen product: h B^T or, backward, dh A (see `matmul.adapted`).

    h: f32 [T, rank]. factor: B or A of each slot, [slots, stride]. ranges, first_row: as in LoraSlots.
    """

    h: Tensor
    factor: Tensor
    ranges: Tensor
    rank: int
    first_row: int = 0

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.h, self.factor, self.ranges

    @property
    def constants(self) -> dict[str, Any]:
        return {"rank": self.rank, "stride": self.factor.shape[1], "first_row": self.first_row}


class FrozenProduct(Protocol):
    """The product with a frozen matrix in one dispatch that also adds LoRA's second product."""

    def adds(self, rec: Recorder, bias: bool) -> bool:
        """Whether the forward product can: its kernel has no more bindings than WebGPU guarantees."""

    def forward(
        self, rec: Recorder, x: Tensor, y: Tensor, bias: Tensor | None, accumulate: bool, low: LowRank | None
    ) -> None:
        """y (+)= x W^T (+ bias) (+ low)."""

    def backward(self, rec: Recorder, dy: Tensor, dx: Tensor, accumulate: bool, low: LowRank | None) -> None:
        """dx (+)= dy W (+ low)."""


@runtime_checkable
class Fusing(FrozenMatrix, Protocol):
    """A frozen matrix whose kernels add LoRA's second product. Those of other matrices are added afterwards."""

    def product(self) -> FrozenProduct | None:
        """None if it takes several dispatches."""


W = TypeVar("W", bound=FrozenMatrix, covariant=True)


@dataclass(frozen=True)
class Linear(Generic[W]):
    """A frozen matrix and an optional bias [out]."""

    weight: W
    bias: Tensor | None = None


@dataclass(frozen=True)
class LoraSlots:
    """The adapters of one module, stacked by slot, and the batch's rows of each slot.

    a, grad_a: f32 [slots, stride >= rank * in], A [rank, in] of each slot. b, grad_b: B [out, rank] likewise. Each
        slot's matrix is padded to whole blocks of the optimizer, and smaller ranks with zeros, which stay zero.
    scale: f32 [slots].
    ranges: u32 [slots, 2], the rows [start, stop) of each slot in the batch.
    draws: u32 [T, 4], dropout keys (see `dropout_apply`); None without dropout.
    module: number of the module, also a dropout key.
    first_row: index in the batch of row 0 of x.
    """

    a: Tensor
    b: Tensor
    grad_a: Tensor
    grad_b: Tensor
    scale: Tensor
    ranges: Tensor
    draws: Tensor | None
    module: int
    rank: int
    first_row: int = 0

    def block(self, start: int, stop: int) -> LoraSlots:
        """The same adapters for a block of rows [start, stop) of x."""
        draws = self.draws.rows(start, stop) if self.draws else None
        return replace(self, draws=draws, first_row=start)

    def of_a(self) -> dict[str, int]:
        """Constants of kernels that read or write A."""
        return {"slots": self.a.shape[0], "stride": self.a.shape[1], "first_row": self.first_row}

    def of_b(self) -> dict[str, int]:
        return {"slots": self.b.shape[0], "stride": self.b.shape[1], "first_row": self.first_row}


def linear(
    rec: Recorder,
    x: Tensor,
    layer: Linear[FrozenMatrix],
    lora: LoraSlots | None = None,
    into: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """x [T, in] -> y [T, out], written or added to `into` if given.

    The backward pass accumulates the gradients of the adapters and, if needed, of x.
    """
    weight = layer.weight
    rows, out, size_in = x.size // weight.in_features, weight.out_features, weight.in_features
    y = into or rec.temp((rows, out), name="linear")
    product = weight.product() if lora and isinstance(weight, Fusing) else None
    h = _hidden(rec, x, lora, rows, size_in) if lora else None
    if lora and h and product and product.adds(rec, layer.bias is not None):
        product.forward(rec, x, y, layer.bias, accumulate, LowRank(h, lora.b, lora.ranges, lora.rank, lora.first_row))
    else:
        weight.forward(rec, x, y, layer.bias, accumulate)
        if lora and h:
            shape = {"m": rows, "n": out, "k": lora.rank, **lora.of_b()}
            rec.dispatch(lora_nt, h, lora.b, y, lora.ranges, accumulate=True, **shape)

    def backward() -> None:
        dy = rec.gradient(y)
        dh = _factor_gradients(rec, rec.again(x), dy, h, lora) if lora and h else None
        if not rec.tracks(x):
            return
        dx, accumulate = rec.gradient_target(x)
        if lora and dh and product and not lora.draws:
            product.backward(rec, dy, dx, accumulate, LowRank(dh, lora.a, lora.ranges, lora.rank, lora.first_row))
            return
        weight.backward(rec, dy, dx, accumulate)
        if lora and dh:
            _input_gradient(rec, dh, dx, lora, rows, size_in)

    rec.node(backward, inputs=[x], outputs=[y], trains=lora is not None)
    return y


def _dropped(rec: Recorder, x: Tensor, lora: LoraSlots) -> Tensor:
    if lora.draws is None:
        return x
    dropped = rec.temp(x.shape, name="dropped")
    rows = lora.draws.shape[0]
    rec.dispatch(dropout_apply, x, lora.draws, dropped, rows=rows, cols=x.size // rows, module=lora.module)
    return dropped


def _hidden(rec: Recorder, x: Tensor, lora: LoraSlots, rows: int, size_in: int) -> Tensor:
    """h = scale dropout(x) A^T [T, rank], which B's gradient needs too."""
    h, dropped = rec.temp((rows, lora.rank), name="h"), _dropped(rec, x, lora)
    rec.dispatch(lora_nt, dropped, lora.a, h, lora.ranges, lora.scale, m=rows, n=lora.rank, k=size_in, **lora.of_a())
    return h


def _factor_gradients(rec: Recorder, x: Tensor, dy: Tensor, h: Tensor, lora: LoraSlots) -> Tensor:
    """Accumulates the gradients of A and B; returns dh = scale dy B [T, rank]."""
    rows = h.shape[0]
    out, size_in, dh = dy.size // rows, x.size // rows, rec.temp(h.shape, name="dh")
    rec.dispatch(lora_nn, dy, lora.b, dh, lora.ranges, lora.scale, m=rows, n=lora.rank, k=out, **lora.of_b())
    rec.dispatch(lora_tn, dy, h, lora.grad_b, lora.ranges, m=out, n=lora.rank, k=rows, **lora.of_b())
    dropped = _dropped(rec, x, lora)
    rec.dispatch(lora_tn, dh, dropped, lora.grad_a, lora.ranges, m=lora.rank, n=size_in, k=rows, **lora.of_a())
    return dh


def _input_gradient(rec: Recorder, dh: Tensor, dx: Tensor, lora: LoraSlots, rows: int, size_in: int) -> None:
    """dx += dropout(dh A), if the kernel of the frozen product does not."""
    shape = {"m": rows, "n": size_in, "k": lora.rank, **lora.of_a()}
    if lora.draws is None:
        rec.dispatch(lora_nn, dh, lora.a, dx, lora.ranges, accumulate=True, **shape)
        return
    ddropped = rec.temp((rows, size_in), name="ddropped")
    rec.dispatch(fill, ddropped, size=ddropped.size)  # rows without a slot are added too
    rec.dispatch(lora_nn, dh, lora.a, ddropped, lora.ranges, **shape)
    rec.dispatch(dropout_apply, ddropped, lora.draws, dx, rows=rows, cols=size_in, module=lora.module, accumulate=True)
