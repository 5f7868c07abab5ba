"""y = x W^T + scale (dropout(x) A^T) B^T: frozen linear layers with LoRA adapters beside them (Hu et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from wgpu_lora.gpu.kernel import Dim, In, InOut, ReadOnly, kernel, linear_grid
from wgpu_lora.gpu.tensor import Tensor, align, spanning
from wgpu_lora.ops.elementwise import dropout_apply, fill
from wgpu_lora.ops.linear.frozen_product import FrozenMatrix, FrozenProduct
from wgpu_lora.ops.linear.lora import LoraSlots, LowRank
from wgpu_lora.ops.matmul.matmul import lora_nn, lora_nt, lora_tn
from wgpu_lora.ops.matmul.matmul_tuning import FEW_ROWS
from wgpu_lora.ops.recorder import Recorder

W = TypeVar("W", bound=FrozenMatrix, covariant=True)


@dataclass(frozen=True)
class Linear(Generic[W]):
    """A frozen matrix and an optional bias [out]."""

    weight: W
    bias: Tensor | None = None


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
    if not into:
        rec.save_for_backward(y)
    product = weight.product(()) if lora else None
    h = _hidden(rec, x, lora) if lora else None
    if lora and h and product and product.adds(rec, layer.bias is not None):
        product.forward(rec, x, y, layer.bias, accumulate, lora.low_rank(h, lora.b))
    else:
        weight.forward(rec, x, y, layer.bias, accumulate)
        if lora and h:
            shape = {"m": rows, "n": out, "k": lora.rank, **lora.columns("a"), **lora.factor_constants(lora.b)}
            rec.dispatch(lora_nt, h, lora.b.params, y, lora.ranges, accumulate=True, **shape)

    def backward() -> None:
        dy, dh = rec.gradient(y), None
        if weight.trains:
            weight.record_gradients(rec, rec.rematerialize(x), dy)
        if lora and h:
            dh = rec.temp(h.shape, name="dh")
            _gradients_of_b(rec, dy, h, dh, lora)
            inputs = _dropout(rec, rec.rematerialize(x), lora)
            shape = {"m": lora.rank, "n": size_in, "k": rows, **lora.columns("a"), **lora.factor_constants(lora.a)}
            rec.dispatch(lora_tn, dh, inputs, lora.a.grads, lora.ranges, **shape)
        if not rec.tracks(x):
            return
        dx, accumulate = rec.gradient_target(x)
        if lora and dh and product and not lora.dropout_keys:
            product.backward(rec, dy, dx, accumulate, lora.low_rank(dh, lora.a))
            return
        weight.backward(rec, dy, dx, accumulate)
        if lora and dh:
            _input_gradient(rec, dh, dx, lora, rows, size_in)

    rec.node(backward, inputs=[x], outputs=[y], trains=lora is not None or weight.trains)
    return y


def linears(
    rec: Recorder,
    x: Tensor,
    layers: Sequence[Linear[FrozenMatrix]],
    loras: Sequence[LoraSlots | None],
    separate: bool = False,
) -> list[Tensor]:
    """x [T, in] -> the outputs [T, out] of several layers, regions of one storage.

    They take one dispatch, and their gradients by x too, if the matrices are stored together and what they multiply is
    the same, as it is without dropout.

    Args:
        separate: whether the outputs may have a storage, and a dispatch, each. They have if one storage would exceed a
            binding of the device.
    """
    weights = [layer.weight for layer in layers]
    rows, size_in = x.size // weights[0].in_features, weights[0].in_features
    if separate and exceed_binding(rec, rows, layers):
        return [linear(rec, x, layer, lora) for layer, lora in zip(layers, loras, strict=True)]
    together = _together(rec, layers, loras)
    ys = rec.temps(*((rows, weight.out_features) for weight in weights), name="linears")
    rec.save_for_backward(*ys)
    all_ys = spanning(ys)
    if not (together and all_ys):
        for layer, lora, y in zip(layers, loras, ys, strict=True):
            linear(rec, x, layer, lora, y)
        return ys
    product, bias, stack = together
    h = _hidden(rec, x, stack) if stack else None
    product.forward(rec, x, all_ys, bias, False, _low_rank(loras, stack, h))

    def backward() -> None:
        dys, dh, low_rank = [rec.gradient(y) for y in ys], None, None
        if stack and h:
            dh = rec.temp(h.shape, name="dh")
            for lora, dy in zip(loras, dys, strict=True):
                if lora:
                    _gradients_of_b(rec, dy, h, dh, lora)
            shape = {"m": stack.rank, "n": size_in, "k": rows, **stack.factor_constants(stack.a)}
            rec.dispatch(lora_tn, dh, rec.rematerialize(x), stack.a.grads, stack.ranges, **shape)
            low_rank = stack.low_rank(dh, stack.a)
        if not rec.tracks(x):
            return
        dx, accumulate = rec.gradient_target(x)
        if rec.compute_dtype != "f16":
            all_dys = spanning(dys)
            assert all_dys is not None, "the gradients of a stack are regions of one storage"
            product.backward(rec, all_dys, dx, accumulate, low_rank)
            return
        for weight, dy in zip(weights, dys, strict=True):  # each has scales of its own
            weight_product = weight.product(())
            assert weight_product is not None
            weight_product.backward(rec, dy, dx, accumulate, low_rank)
            accumulate, low_rank = True, None

    rec.node(backward, inputs=[x], outputs=ys, trains=stack is not None)
    return ys


def exceed_binding(rec: Recorder, rows: int, layers: Sequence[Linear[FrozenMatrix]]) -> bool:
    """Whether the outputs of several layers, in one storage, would exceed a binding of the device."""
    return sum(align(4 * rows * layer.weight.out_features) for layer in layers) > rec.program.device.max_binding


def gated_linears(
    rec: Recorder, x: Tensor, layers: Sequence[Linear[FrozenMatrix]], loras: Sequence[LoraSlots | None]
) -> Tensor | None:
    """silu(first layer) * second layer [T, out] in one dispatch, without a backward pass; None if that is not possible.

    It keeps both sums of each output, for which there is room in tiles of few rows.
    """
    rows, outs = x.size // layers[0].weight.in_features, {layer.weight.out_features for layer in layers}
    few = rows <= FEW_ROWS or rec.program.decoding
    possible = not rec.training and rec.compute_dtype == "f32" and few and len(outs) == 1
    together = _together(rec, layers, loras) if possible else None
    if together is None:
        return None
    product, bias, stack = together
    h, y = _hidden(rec, x, stack) if stack else None, rec.temp((rows, *outs), name="gated")
    product.forward(rec, x, y, bias, False, _low_rank(loras, stack, h), gated=True)
    return y


def _together(
    rec: Recorder, layers: Sequence[Linear[FrozenMatrix]], loras: Sequence[LoraSlots | None]
) -> tuple[FrozenProduct, Tensor | None, LoraSlots | None] | None:
    """The product with all layers, their biases and their adapters; None if they take several dispatches."""
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers if layer.bias]
    of, bias = [lora for lora in loras if lora], spanning(biases) if len(biases) == len(layers) else None
    product = weights[0].product(weights[1:]) if len(weights) > 1 else None
    alike = all(lora.stack is of[0].stack and not lora.dropout_keys for lora in of) and (
        not of or of[0].stack.size == len(of)
    )
    fits = product and (not biases or bias) and (not of or product.adds(rec, bool(biases)))
    return (product, bias, of[0].whole() if of else None) if product and alike and fits else None


def _low_rank(loras: Sequence[LoraSlots | None], stack: LoraSlots | None, h: Tensor | None) -> LowRank | None:
    parts = "".join("1" if lora else "0" for lora in loras).ljust(3, "1")
    return next(lora for lora in loras if lora).low_rank(h, stack.b, parts) if stack and h else None


def _dropout(rec: Recorder, x: Tensor, lora: LoraSlots) -> Tensor:
    if lora.dropout_keys is None:
        return x
    result = rec.temp(x.shape, name="dropped")
    rows = lora.dropout_keys.shape[0]
    rec.dispatch(dropout_apply, x, lora.dropout_keys, result, rows=rows, cols=x.size // rows, module=lora.module)
    return result


def _hidden(rec: Recorder, x: Tensor, lora: LoraSlots) -> Tensor:
    """h = scale dropout(x) A^T, f32 [T, width of the stack], of which a module has `rank` columns."""
    rows = x.shape[0]
    h, inputs = rec.temp((rows, lora.width), name="h"), _dropout(rec, x, lora)
    shape = {"m": rows, "n": lora.rank, "k": x.size // rows, **lora.columns("y"), **lora.factor_constants(lora.a)}
    rec.dispatch(lora_nt, inputs, lora.a.params, h, lora.ranges, lora.stack.scale, **shape)
    rec.save_for_backward(h)
    return h


def _gradients_of_b(rec: Recorder, dy: Tensor, h: Tensor, dh: Tensor, lora: LoraSlots) -> None:
    """Accumulates the gradient of B; writes dh = scale dy B."""
    rows, out, of_b = h.shape[0], dy.size // h.shape[0], lora.factor_constants(lora.b)
    shape = {"m": rows, "n": lora.rank, "k": out, **lora.columns("y"), **of_b}
    rec.dispatch(lora_nn, dy, lora.b.params, dh, lora.ranges, lora.stack.scale, **shape)
    shape = {"m": out, "n": lora.rank, "k": rows, **lora.columns("b"), **of_b}
    rec.dispatch(lora_tn, dy, h, lora.b.grads, lora.ranges, **shape)


def _input_gradient(rec: Recorder, dh: Tensor, dx: Tensor, lora: LoraSlots, rows: int, size_in: int) -> None:
    """dx += dropout(dh A), if the kernel of the frozen product does not."""
    shape = {"m": rows, "n": size_in, "k": lora.rank, **lora.columns("a"), **lora.factor_constants(lora.a)}
    if lora.dropout_keys is None:
        rec.dispatch(lora_nn, dh, lora.a.params, dx, lora.ranges, accumulate=True, **shape)
        return
    ddropped = rec.temp((rows, size_in), name="ddropped")
    rec.dispatch(fill, ddropped, size=ddropped.size)  # rows without a slot are added too
    rec.dispatch(lora_nn, dh, lora.a.params, ddropped, lora.ranges, **shape)
    rec.dispatch(
        dropout_apply, ddropped, lora.dropout_keys, dx, rows=rows, cols=size_in, module=lora.module, accumulate=True
    )


def frozen_low_rank(rec: Recorder, x: Tensor, y: Tensor, lora: LoraSlots) -> None:
    """y += scale (x A^T) B^T by slot, with factors that have no gradient."""
    rows, size_in, out = x.shape[0], x.size // x.shape[0], y.size // x.shape[0]
    h = _hidden(rec, x, lora)
    shape = {"m": rows, "n": out, "k": lora.rank, **lora.columns("a"), **lora.factor_constants(lora.b)}
    rec.dispatch(lora_nt, h, lora.b.params, y, lora.ranges, accumulate=True, **shape)

    def backward() -> None:
        dh = rec.temp(h.shape, name="dh")
        shape = {"m": rows, "n": lora.rank, "k": out, **lora.columns("y"), **lora.factor_constants(lora.b)}
        rec.dispatch(lora_nn, rec.gradient(y), lora.b.params, dh, lora.ranges, lora.stack.scale, **shape)
        dx, accumulate = rec.gradient_target(x)
        if not accumulate:
            rec.dispatch(fill, dx, size=dx.size)  # rows without a slot, too
        _input_gradient(rec, dh, dx, lora, rows, size_in)

    if rec.tracks(x):
        rec.node(backward, inputs=[x], outputs=[y])


@kernel("input_squares.wgsl", grid=lambda c: linear_grid(c.cols), lib=("linear",))
def input_squares(x: In, count: ReadOnly, squares: InOut, *, rows: Dim, first: Dim, cols: Dim) -> Any:
    """squares[c] += the sum of x[r, c]^2 over the rows in use.

    x has `rows` rows of a batch, from its row `first` on; the first `count` rows of the batch are in use.
    """
    values = x.reshape(rows, cols)[: max(0, min(rows, int(count.reshape(-1)[0]) - first))]
    return squares + (values**2).sum(axis=0)


@dataclass(frozen=True)
class MeasuredMatrix(FrozenMatrix):
    """A frozen matrix whose inputs are summed up as it is multiplied; it is not stacked with others.

    count: u32 [1], the rows of the batch in use. squares: f32 [in], is added to.
    first_row: index in the batch of row 0 of x.
    """

    out_features: int
    in_features: int
    weight: FrozenMatrix
    count: Tensor
    squares: Tensor
    first_row: int = 0

    def block(self, start: int) -> MeasuredMatrix:
        return replace(self, first_row=start)

    def forward(self, rec: Recorder, x: Tensor, y: Tensor, bias: Tensor | None, accumulate: bool) -> None:
        shape: dict[str, Any] = {"rows": x.size // self.in_features, "first": self.first_row, "cols": self.in_features}
        rec.dispatch(input_squares, x, self.count, self.squares, **shape)
        self.weight.forward(rec, x, y, bias, accumulate)

    def backward(self, rec: Recorder, dy: Tensor, dx: Tensor, accumulate: bool) -> None:
        raise NotImplementedError("an observed matrix only passes forward")
