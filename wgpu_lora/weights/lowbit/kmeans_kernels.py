"""Fits of lookup tables and group scales to a matrix: k-means of each row, and scales by least squares; first the
reference in float64 of the whole fit, then the kernels.

Each row o of W [rows, in] is approximated by scale[o, i // group] * table[o, code[o, i]]. Kernels see x = w / scale,
each with the weight importance[i] * scale^2, so what they reduce is W's own error, sum(importance (w - scale t)^2).
Without scales (group 0), x = w. References give NaN where the result depends on the rounding of f32: a value on a
threshold, or two ways to divide a row that are equally good.

The table is found by weighted k-means in one dimension (Lloyd 1982) on the values divided by their group's largest
magnitude. The weights are the squares of these magnitudes, so that it is W's own squared error that is reduced, times
the importance of each input, such as the second moments of activations. The scales are fitted to the chosen table
values then, by least squares, and each value gets the nearest code under the rounded table and scale.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from wgpu_lora.gpu import reference_values
from wgpu_lora.gpu.kernel import (
    F32,
    U32,
    Dim,
    Grid,
    In,
    InOut,
    Offset,
    Out,
    ReadOnly,
    by_subgroup,
    kernel,
    linear_grid,
    row_grid,
)
from wgpu_lora.gpu.reference_values import Part, evenly_spaced, select_rows
from wgpu_lora.gpu.tiling import Arrays, Capabilities, Constants, Tiling
from wgpu_lora.weights.lowbit.lowbit_layout import pack, to_words

ROUNDS = 30  # of k-means, at most

# The optimal quantisers of N(0, 1), where k-means begins (Max 1960, table I): the positive half.
GAUSSIAN = {
    2: (0.4528, 1.510),
    3: (0.2451, 0.7560, 1.344, 2.152),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733),
}


def fit(
    w: np.ndarray, bits: int, group: int, weights: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Fits tables and scales to W [out, in], as loading and `quantize` do on the device.

    Args:
        bits: 2, 3 or 4.
        group: values of a row that share a scale, a divisor of `in`; 0 if the table alone represents the row.
        weights: the importance of each input [in], at least 0; by default, that of all is 1.

    Returns:
        (codes uint8 [out, in], table float16 [out, 2^bits] in ascending order, scales float16 [in / group, out], or
        None without groups).
    """
    values = np.asarray(w, np.float64)
    importance = np.ones(values.shape[1]) if weights is None else np.asarray(weights, np.float64)
    scales = largest(values, group) if group else np.ones((values.shape[0], 1))
    spread = np.repeat(scales, values.shape[1] // scales.shape[1], axis=1)
    table = kmeans(values / spread, spread**2 * importance, bits).astype(np.float16).astype(np.float64)
    codes = nearest(values / spread, table)
    if not group:
        return codes, table.astype(np.float16), None
    centres = np.take_along_axis(table, codes.astype(np.intp), axis=1).reshape(*scales.shape, group)
    groups, weight = values.reshape(centres.shape), importance.reshape(1, -1, group)
    squares = (weight * centres**2).sum(axis=2)
    fitted = (weight * centres * groups).sum(axis=2) / np.where(squares > 0, squares, 1)
    with np.errstate(over="ignore"):  # the caller reports values out of f16's range
        rounded = np.where(fitted > 0, fitted, scales).astype(np.float16)
    spread = np.repeat(rounded.astype(np.float64), group, axis=1)
    codes = nearest(values / np.where(spread > 0, spread, 1), table)
    return codes, table.astype(np.float16), np.ascontiguousarray(rounded.T)


def largest(values: np.ndarray, group: int) -> np.ndarray:
    """The largest magnitude of each group [out, in / group], at least 2^-24, the smallest positive f16."""
    value = np.abs(values.reshape(values.shape[0], -1, group)).max(axis=2)
    result: np.ndarray = np.maximum(value, 2.0**-24)
    return result


def kmeans(values: np.ndarray, weights: np.ndarray, bits: int) -> np.ndarray:
    """The weighted k-means of each row: float64 [out, 2^bits] in ascending order, from values and weights [out, in].

    Each row begins with the Gaussian quantiser of its mean and deviation, and ends when no value changes its cluster. A
    cluster without weight keeps its value.
    """
    total = weights.sum(axis=1, keepdims=True)
    total[total == 0] = 1.0
    mean = (weights * values).sum(axis=1, keepdims=True) / total
    deviation = np.sqrt((weights * (values - mean) ** 2).sum(axis=1, keepdims=True) / total)
    half = np.array(GAUSSIAN[bits])
    table: np.ndarray = mean + deviation * np.concatenate([-half[::-1], half])
    order = np.argsort(values, axis=1, kind="stable")
    sorted_values = np.take_along_axis(values, order, axis=1)
    mass = np.take_along_axis(weights, order, axis=1)
    zeros = np.zeros((len(values), 1))
    masses = np.concatenate([zeros, np.cumsum(mass, axis=1)], axis=1)
    moments = np.concatenate([zeros, np.cumsum(mass * sorted_values, axis=1)], axis=1)
    for row, result in enumerate(table):
        before = None
        for _ in range(ROUNDS):
            inner = np.searchsorted(sorted_values[row], (result[1:] + result[:-1]) / 2)
            bounds = np.concatenate([[0], inner, [values.shape[1]]])
            if before is not None and (bounds == before).all():
                break
            own, sums = np.diff(masses[row][bounds]), np.diff(moments[row][bounds])
            filled = own > 0
            result[filled] = sums[filled] / own[filled]
            result.sort()
            before = bounds
    return table


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The codes uint8 [out, in] of the nearest values of each row's ascending table; of two, the lower one."""
    codes = [np.searchsorted((row[1:] + row[:-1]) / 2, own) for own, row in zip(values, table, strict=True)]
    return np.stack(codes).astype(np.uint8)


def fit_int8(w: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric 8-bit codes int8 [out, in] and scales float16 [groups, out] of W; group 0 is one scale per row.

    scale = max |W| / 127 over the group, rounded up to f16 so that no value is clipped.
    """
    values = np.asarray(w, np.float64)
    groups = values.reshape(len(values), -1, group or values.shape[1])
    exact = np.abs(groups).max(axis=2) / 127
    with np.errstate(over="ignore"):
        scales = exact.astype(np.float16)
        scales = np.where(scales < exact, np.nextafter(scales, np.float16(np.inf)), scales)
    spread = np.where(scales > 0, scales, 1).astype(np.float64)[:, :, None]
    codes = np.rint(groups / spread).clip(-127, 127).astype(np.int8)
    return codes.reshape(values.shape), np.ascontiguousarray(scales.T)


BINS = 64
SMALLEST = 2.0**-24  # of the positive f16: a scale of 0 would leave values without a quotient
ON_EDGE = 5e-5  # of a bin: values that close to an edge are in either bin to f32
NEAR = 4e-6  # of the largest centre: values that close to a threshold are on either side to f32
CLOSE = 3e-6  # of a histogram's gain: ways to divide it that are closer than that are the same to f32


def fit_part(arrays: Arrays, c: Constants) -> Part | None:
    """Some rows of the matrix, since references of k-means take long."""
    if c["rows"] <= reference_values.ROWS:
        return None
    rows = evenly_spaced(c["rows"], reference_values.ROWS)
    names = " ".join(name for name in arrays if name in ("w", "scales", "table"))
    return select_rows(arrays, names, c["rows"], rows), {**c, "rows": rows.size}


def _spread(c: Constants, scales: Any) -> Any:
    """The scale of each value [rows, in]."""
    rows, size_in = c["rows"], c["size_in"]
    if scales is None:
        return np.ones((rows, size_in))
    return np.repeat(scales.reshape(rows, -1), c["group"], axis=1)


def _weighted(c: Constants, w: Any, scales: Any, importance: Any) -> tuple[np.ndarray, np.ndarray]:
    """The values that k-means sees, and their weights [rows, in]."""
    spread = _spread(c, scales)
    return w.reshape(spread.shape) / spread, spread**2 * (1 if importance is None else importance)


def _comparable(result: np.ndarray) -> np.ndarray | None:
    """A reference's result, or None if nothing of it can be compared: the kernel is checked in another call then."""
    return result if np.isfinite(result).any() else None


@kernel("fit/group_largest.wgsl", grid=lambda c: linear_grid(c.size), lib=("linear",))
def group_largest(w: ReadOnly, scales: Out, *, size: Dim, group: U32, levels: F32 = 1.0) -> Any:
    """scales[g] = max |w| / levels over the `group` values of group g, at least 2^-24, for `size` groups."""
    largest = np.abs(w.reshape(-1)[: size * group].reshape(size, group)).max(axis=1)
    return np.maximum(largest / levels, SMALLEST)


@kernel("fit/round_half.wgsl", grid=lambda c: linear_grid(c.size), lib=("linear", "half"))
def round_half(x: InOut, *, size: Dim) -> Any:
    """x rounded to f16."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float64)


def _alone(capabilities: Capabilities, c: Any) -> list[Tiling]:
    """A subgroup per row, or a thread with the workgroup memory for itself."""
    size = capabilities.subgroup_size
    return [Tiling("broadcast", size), Tiling(lanes=1)] if size >= 4 else [Tiling(lanes=1)]


def _group_per_row(c: Any) -> Grid:
    return linear_grid(c.rows, 1)


@kernel("fit/lut_start.wgsl.j2", grid=_group_per_row, variants=_alone, part=fit_part)
def lut_start(
    w: ReadOnly,
    table: Out,
    scales: In = None,
    importance: ReadOnly = None,
    *,
    rows: Dim,
    size_in: Dim,
    group: U32,
    bits: U32,
) -> Any:
    """table[r] [2^bits] = the best centres for a histogram of row r's values, in ascending order.

    The bins are of sign(x) sqrt(|x| / max |x|), 32 on either side of 0. Every way to make 2^bits clusters of
    successive bins is considered (dynamic programming; Wang and Song 2011).
    """
    x, weights = _weighted({"rows": rows, "size_in": size_in, "group": group}, w, scales, importance)
    result = (_histogram(*row) for row in zip(x, weights, strict=True))
    return _comparable(
        np.stack([_divided(*histogram, 2**bits) if histogram else np.full(2**bits, np.nan) for histogram in result])
    )


def _histogram(x: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The sums of weights and of weighted values before each edge of the bins; None if a value is on one."""
    half = BINS // 2
    roots = np.sign(x) * np.sqrt(np.abs(x) / max(np.abs(x).max(), 1e-30))
    positions = half + half * roots
    inner = positions[(positions > 0.5) & (positions < BINS - 0.5) & (x != 0)]
    if (np.abs(inner - np.rint(inner)) < ON_EDGE).any():
        return None
    bins = np.minimum(positions, BINS - 1).astype(np.int64)
    sums = [np.bincount(bins, values, BINS) for values in (weights, weights * x)]
    mass, moment = (np.concatenate([[0], np.cumsum(item)]) for item in sums)
    return mass, moment


def _divided(mass: np.ndarray, moment: np.ndarray, count: int) -> np.ndarray:
    """The centres of the best division of a histogram, or NaN if another is as good to f32."""
    between, moments = mass[None] - mass[:, None], moment[None] - moment[:, None]
    filled = between > 1e-6 * mass[-1]
    gain = np.where(filled, moments**2 / np.where(filled, between, 1), 0.0)
    gain[np.tril_indices(mass.size, -1)] = -np.inf
    gains = [gain[0]]
    for _ in range(count - 1):
        gains.append((gains[-1][:, None] + gain).max(axis=0))
    table, stop, centre = np.zeros(count), mass.size - 1, 0.0
    for k in reversed(range(count)):
        ways = gains[k - 1] + gain[:, stop] if k else np.zeros(1)
        cut = int(ways.argmax())
        ties = (ways > ways[cut] - CLOSE * gains[-1][-1]) & (between[cut, : ways.size] != 0)
        if ties.any():
            return np.full(count, np.nan)
        if filled[cut, stop]:
            centre = moments[cut, stop] / between[cut, stop]
        table[k], stop = centre, cut
    return table


@kernel("fit/lut_lloyd.wgsl.j2", grid=row_grid(lambda c: c.rows), variants=by_subgroup, part=fit_part)
def lut_lloyd(
    w: ReadOnly,
    table: InOut,
    scales: In = None,
    importance: ReadOnly = None,
    *,
    rows: Dim,
    size_in: Dim,
    group: U32,
    bits: U32,
    iterations: Dim,
) -> Any:
    """table[r] after `iterations` of k-means (Lloyd 1982): each centre becomes the mean of the values nearest to it.

    Centres are in ascending order, and of two that are equally near the lower one is taken. A cluster with less than a
    millionth of the weight keeps its centre.
    """
    x, weights = _weighted({"rows": rows, "size_in": size_in, "group": group}, w, scales, importance)
    result = table.reshape(rows, 2**bits).copy()
    for own, values, mass in zip(result, x, weights, strict=True):
        for _ in range(iterations):
            codes, close = _nearest(values, own)
            if close.any():
                own[:] = np.nan
                break
            masses, moments = (np.bincount(codes, terms, own.size) for terms in (mass, mass * values))
            filled = masses > 1e-6 * masses.sum()
            own[filled] = moments[filled] / masses[filled]
    return _comparable(result)


@kernel("fit/lut_rescale.wgsl.j2", grid=row_grid(lambda c: c.rows), variants=by_subgroup, part=fit_part)
def lut_rescale(
    w: ReadOnly,
    table: In,
    scales: InOut,
    importance: ReadOnly = None,
    *,
    rows: Dim,
    size_in: Dim,
    group: U32,
    bits: U32,
) -> Any:
    """scales[r, g] = sum(importance w t) / sum(importance t^2) over group g, t being the centre nearest to w / scale.

    A scale stays as it is if that is not positive, and is at least 2^-24.
    """
    x, _ = _weighted({"rows": rows, "size_in": size_in, "group": group}, w, scales, None)
    tables = table.reshape(rows, 2**bits)
    result = [_nearest(values, own) for values, own in zip(x, tables, strict=True)]
    centres = np.stack([own[codes] for (codes, _), own in zip(result, tables, strict=True)])
    close = np.stack([close for _, close in result]).reshape(rows, -1, group).any(axis=2)
    weights = np.ones(size_in) if importance is None else importance
    sums = [
        (weights * centres * factor).reshape(rows, -1, group).sum(axis=2)
        for factor in (w.reshape(rows, size_in), centres)
    ]
    fits = (sums[0] > 0) & (sums[1] > 0)
    fitted = np.where(fits, sums[0] / np.where(fits, sums[1], 1), scales.reshape(rows, -1))
    return _comparable(np.where(close, np.nan, np.maximum(fitted, SMALLEST)))


def _nearest(values: np.ndarray, own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The codes of the nearest centres, and whether another one is as near to f32."""
    between = (own[1:] + own[:-1]) / 2
    codes = np.searchsorted(between, values)
    sides = [np.abs(values - between[np.clip(codes + at, 0, between.size - 1)]) for at in (-1, 0)]
    equal = np.append(np.diff(own) == 0, False)[np.minimum(codes, own.size - 1)]  # of equal centres either is right
    return codes, (np.minimum(*sides) < NEAR * np.abs(own).max()) & ~equal


@kernel("fit/lowbit_encode.wgsl.j2", grid=lambda c: linear_grid(c.rows * -(-c.size_in // 32)), lib=("linear",))
def lowbit_encode(
    w: ReadOnly,
    codes: InOut,
    table: In = None,
    scales: In = None,
    *,
    rows: Dim,
    first: Offset[Dim],
    out: Dim,
    size_in: Dim,
    group: U32,
    bits: U32,
) -> Any:
    """codes u32 [word_rows, out], columns from `first` on = the nearest codes of w / scale [rows, in], packed.

    scales: [rows, in / group] or, in group 0, [rows]. Of two table values that are equally near, the lower one
    is taken. 8 bits are the nearest integers, from -127 to 127.
    """
    x = w.reshape(rows, size_in)
    if scales is not None:
        x = x / np.repeat(scales.reshape(rows, -1), group or size_in, axis=1)
    if table is None:
        value = np.rint(x).clip(-127, 127).astype(np.int8)
    else:
        tables = table.reshape(rows, 2**bits)
        pairs = zip(x, tables, strict=True)
        indices = [np.searchsorted((own[1:] + own[:-1]) / 2, values) for values, own in pairs]
        value = np.stack(indices).astype(np.uint8)
    result = codes.reshape(-1, out).copy()
    result[:, first : first + rows] = to_words(pack(value, bits), size_in, bits)
    return result
