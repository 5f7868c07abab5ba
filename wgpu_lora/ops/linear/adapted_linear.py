"""Frozen linear layers with adapters of all kinds: LoRA, DoRA, and LoRA beside a frozen offset of the weight.

An initialisation such as PiSSA's subtracts the initial B0 A0 from the weight. The weight here is shared by all adapters
and stays as it is, so -s B0 A0 is a frozen adapter of its own, the offset, which is part of the layer's weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.elementwise import dropout_parts
from wgpu_lora.ops.linear.dora import magnified
from wgpu_lora.ops.linear.frozen_product import FrozenMatrix
from wgpu_lora.ops.linear.linear import Linear, exceed_binding, frozen_low_rank, gated_linears, linear, linears
from wgpu_lora.ops.linear.lora import LoraSlots
from wgpu_lora.ops.recorder import Recorder


def adapted_linear(
    rec: Recorder,
    x: Tensor,
    layer: Linear[FrozenMatrix],
    lora: LoraSlots | None = None,
    into: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """x [T, in] -> y [T, out], written or added to `into` if given, with what the adapters of x's rows do.

    With DoRA and dropout d, as in PEFT: y = x W^T + bias + (g - 1) d(x) W^T + g d(x) (s B A)^T.
    """
    if lora is None or lora.plain:
        return linear(rec, x, layer, lora, into, accumulate)
    own = replace(lora, magnitudes=None, offset=None)
    if lora.magnitudes is None:
        y = linear(rec, x, layer, own, into, accumulate)
    else:
        y = into or rec.temp((x.size // layer.weight.in_features, layer.weight.out_features), name="dora")
        if lora.dropout_keys:
            dropped, remainder = dropout_parts(rec, x, lora.dropout_keys, lora.module)
            linear(rec, remainder, layer, None, y, accumulate)
            u = linear(rec, dropped, Linear(layer.weight), replace(own, dropout_keys=None))
            magnified(rec, u, lora, None, y, accumulate=True)
        else:
            u = linear(rec, x, Linear(layer.weight), own)
            magnified(rec, u, lora, layer.bias, y, accumulate)
    if lora.offset:
        frozen_low_rank(rec, x, y, lora.offset)
    return y


def adapted_linears(
    rec: Recorder,
    x: Tensor,
    layers: Sequence[Linear[FrozenMatrix]],
    loras: Sequence[LoraSlots | None],
    separate: bool = False,
) -> list[Tensor]:
    """x [T, in] -> the outputs [T, out] of several layers, as `ops.linear.linear.linears` computes and stores them."""
    result = [lora for lora in loras if lora]
    if all(lora.plain for lora in result):
        return linears(rec, x, layers, loras, separate)
    own = [lora and replace(lora, magnitudes=None, offset=None) for lora in loras]
    if not any(lora.magnitudes for lora in result):
        ys = linears(rec, x, layers, own, separate)
    elif len(result) == len(loras) and all(lora.magnitudes and not lora.dropout_keys for lora in result):
        us = linears(rec, x, [Linear(layer.weight) for layer in layers], own, separate)
        ys = _like(rec, us)
        for u, y, layer, lora in zip(us, ys, layers, result, strict=True):
            magnified(rec, u, lora, layer.bias, y, accumulate=False)
    else:
        rows = x.size // layers[0].weight.in_features
        shapes = [(rows, layer.weight.out_features) for layer in layers]
        alone = separate and exceed_binding(rec, rows, layers)
        ys = [rec.temp(shape, name="dora") for shape in shapes] if alone else rec.temps(*shapes, name="dora")
        return [adapted_linear(rec, x, layer, lora, y) for layer, lora, y in zip(layers, loras, ys, strict=True)]
    for offset, y in zip([lora and lora.offset for lora in loras], ys, strict=True):
        if offset:
            frozen_low_rank(rec, x, y, offset)
    return ys


def adapted_gated(
    rec: Recorder, x: Tensor, layers: Sequence[Linear[FrozenMatrix]], loras: Sequence[LoraSlots | None]
) -> Tensor | None:
    """`ops.linear.linear.gated_linears`, which only LoRA and layers without adapters allow."""
    plain = all(lora is None or lora.plain for lora in loras)
    return gated_linears(rec, x, layers, loras) if plain else None


def _like(rec: Recorder, tensors: Sequence[Tensor]) -> list[Tensor]:
    """New tensors of the same shapes, in one storage if these are."""
    shapes = [tensor.shape for tensor in tensors]
    if len({tensor.storage for tensor in tensors}) == 1:
        return rec.temps(*shapes, name="dora")
    return [rec.temp(shape, name="dora") for shape in shapes]
