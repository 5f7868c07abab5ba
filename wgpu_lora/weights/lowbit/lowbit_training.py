"""The gradients of tables and scales, whose codes are frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import U32, Dim, In, InOut, Offset, Out, ReadOnly, cdiv, kernel, linear_grid
from wgpu_lora.gpu.reference_values import Part, evenly_spaced, is_expensive
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.gpu.tiling import Arrays, Constants
from wgpu_lora.ops.linear.frozen_product import FrozenMatrix, FrozenProduct
from wgpu_lora.ops.linear.trained_matrix import TrainedMatrix
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.weights.lowbit.lowbit_layout import (
    from_words,
    join_constants,
    scale_count,
    split_constants,
    table_size,
    unpack,
)
from wgpu_lora.weights.lowbit.lowbit_products import codes_product

SLICE = 128  # inputs that an invocation takes: whole words and groups
CHECKED = 64  # rows of a large call that are compared with the reference


def _slices(size_in: int) -> int:
    return cdiv(size_in, SLICE)


def _sums(bits: int, group: int) -> int:
    """The sums of a row that are made of several slices: those of its table's entries, or of its only scale."""
    return table_size(bits) or (0 if group else 1)


def _run(bits: int) -> int:
    """Codes of a word of the first plane."""
    return {2: 16, 3: 16, 4: 8, 8: 4}[bits]


def _some_rows(arrays: Arrays, c: Constants) -> Part | None:
    """Some rows of W: columns of dw."""
    out, size_in, columns, bits, group = (c[name] for name in ("out", "size_in", "columns", "bits", "group"))
    if not is_expensive(size_in * columns, arrays):
        return None
    selection = evenly_spaced(columns, CHECKED)
    rows = c["first"] + selection
    smaller = {
        "dw": arrays["dw"].reshape(size_in, -1)[:, selection],
        "codes": arrays["codes"].reshape(-1, out)[:, rows],
    }
    if "partials" in arrays:
        smaller["partials"] = arrays["partials"].reshape(-1, columns)[:, selection]
    for name in ("constants", "dconstants"):
        if name in arrays:
            table, scales = split_constants(arrays[name], (out, size_in), bits, group)
            cut = None if table is None else table[rows], None if scales is None else scales[:, rows]
            smaller[name] = join_constants(*cut)
    return smaller, {**c, "out": selection.size, "columns": selection.size, "first": 0}


@kernel(
    "codes_gradient.wgsl.j2",
    grid=lambda c: linear_grid(c.columns * _slices(c.size_in)),
    lib=("linear",),
    specialise=lambda c: {"ragged": c.size_in % _run(c.bits) != 0},
    part=_some_rows,
)
def codes_gradient(
    dw: In,
    codes: ReadOnly,
    constants: In = None,
    dconstants: InOut = None,
    partials: Out = None,
    *,
    out: Dim,
    size_in: Dim,
    columns: Dim,
    first: Offset[Dim],
    bits: U32,
    group: U32,
) -> Any:
    """The gradients by constants, from dw = dW^T of the rows [first, first + columns) (see lowbit_layout.decode).

    Those by scales of groups are added: dscale[g, o] += sum over i of group g of entry[o, i] dW[o, i]. Those by entries
    of a table or, of 8 bits without groups, by the row's scale are left as partials[s, c, o] = sum over i of slice s
    with code c of scale[o, i] dW[o, i].
    """
    rows, shape, edges = slice(first, first + columns), (out, size_in), np.arange(0, size_in, SLICE)
    words = codes.reshape(-1, out)[:, rows].astype(np.uint32)
    code_values, gradient = unpack(from_words(words, size_in, bits), size_in, bits), dw.reshape(size_in, columns).T
    by_entry, results = [gradient * code_values], []
    if group:
        table, scales = (None, None) if constants is None else split_constants(constants, shape, bits, group)
        dtable, dscales = split_constants(dconstants.reshape(-1).copy(), shape, bits, group)
        entry = code_values if table is None else np.take_along_axis(table[rows], code_values.astype(np.intp), axis=1)
        assert dscales is not None
        dscales[:, rows] += (gradient * entry).reshape(columns, -1, group).sum(axis=2).T
        results.append(join_constants(dtable, dscales))
        if scales is not None:
            gradient = gradient * np.repeat(scales[:, rows].T, group, axis=1)
    if table_size(bits):
        by_entry = [np.where(code_values == entry, gradient, 0) for entry in range(table_size(bits))]
    if partials is not None:
        results.append(np.array([np.add.reduceat(values, edges, axis=1).T for values in by_entry]).transpose(1, 0, 2))
    return tuple(results)


@kernel("codes_gradient_sum.wgsl.j2", grid=lambda c: linear_grid(c.columns * c.entries), lib=("linear",))
def codes_gradient_sum(
    partials: In, dconstants: InOut, *, columns: Dim, first: Offset[Dim], slices: Dim, entries: U32
) -> Any:
    """dconstants[first + o, e] += sum over s of partials[s, e, o]."""
    result = dconstants.reshape(-1).copy()
    sums = partials.reshape(-1)[: slices * entries * columns].reshape(slices, entries, columns).sum(axis=0)
    result[first * entries :][: columns * entries] += sums.T.reshape(-1)
    return result


def record_codes_gradient(
    rec: Recorder,
    dw: Tensor,
    codes: Tensor,
    constants: Tensor,
    dconstants: Tensor,
    shape: tuple[int, int],
    first: int,
    bits: int,
    group: int,
) -> None:
    """Adds the gradients of a block of rows, dw f32 [in, columns], to those of the constants. shape: (out, in) of W."""
    (out, size_in), columns = shape, dw.shape[1]
    sums, slices = _sums(bits, group), _slices(shape[1])
    partials = rec.temp((slices, sums, columns), name="partials") if sums else None
    tensors = constants if group and table_size(bits) else None, dconstants if group else None, partials
    block = {"columns": columns, "first": first}
    rec.dispatch(codes_gradient, dw, codes, *tensors, out=out, size_in=size_in, bits=bits, group=group, **block)
    if partials:
        rec.dispatch(codes_gradient_sum, partials, dconstants, slices=slices, entries=sums, **block)


CONSTANTS = "constants"


@dataclass(frozen=True)
class TrainedCodes(TrainedMatrix):
    """constants: f32 [entries + groups, out], all tables and then all scales, as the products read them; only their
    order matters."""

    out_features: int
    in_features: int
    bits: int
    group: int
    codes: Tensor
    constants: Tensor

    def product(self, siblings: Sequence[FrozenMatrix]) -> FrozenProduct | None:
        shape = (self.out_features,), self.in_features
        return None if siblings else codes_product(*shape, self.bits, self.group, self.codes, self.constants)

    def reduce_dw(self, rec: Recorder, dw: Tensor, first: int) -> None:
        shape = self.out_features, self.in_features
        tensors = self.codes, self.constants, self.grads[CONSTANTS]
        record_codes_gradient(rec, dw, *tensors, shape, first, self.bits, self.group)


def constants_shape(shape: tuple[int, int], bits: int, group: int) -> tuple[int, int]:
    """The shape of all constants of a matrix [out, in] as one array."""
    out, size_in = shape
    return table_size(bits) + scale_count(size_in, bits, group), out
