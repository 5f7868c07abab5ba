"""The fit of lookup tables and scales to a matrix: the NumPy reference in float64, of what loading and `quantize`
compute.

W[o, i] is approximated by scale[i // G, o] * table[o, code[o, i]], with a table of 2^bits values for each row o and a
scale for each group of G values of a row. The table is found by weighted k-means in one dimension (Lloyd 1982) on the
values divided by their group's largest magnitude. The weights are the squares of these magnitudes, so that it is W's
own squared error that is reduced, times the importance of each input, such as the second moments of activations. The
scales are fitted to the chosen table values then, by least squares, and each value gets the nearest code under the
rounded table and scale.
"""

from __future__ import annotations

import numpy as np

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
    """Fits tables and scales to W [out, in].

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
