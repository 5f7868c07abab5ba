"""The dynamic map of 8-bit optimizers (Dettmers et al. 2022, arXiv:2110.02861), as bitsandbytes' create_dynamic_map."""

from __future__ import annotations

from functools import cache

import numpy as np

DECADES = 7


@cache
def dynamic_map(signed: bool) -> np.ndarray:
    """The 256 values of the codes, ascending, from -1 or 0 to 1: float64 [256] of float32 values."""
    found = [0.0, 1.0]
    for decade in range(DECADES):
        edges = np.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        middles = 10.0 ** (decade - DECADES + 1) * (edges[:-1] + edges[1:]) / 2
        found += [*middles, *(-middles if signed else ())]
    values: np.ndarray = np.sort(np.array(found)).astype(np.float32).astype(np.float64)
    values.flags.writeable = False
    return values


def nearest_codes(values: np.ndarray, signed: bool) -> np.ndarray:
    """The codes of the nearest values of the map: uint8, of the same shape."""
    table = dynamic_map(signed)
    return np.searchsorted((table[1:] + table[:-1]) / 2, values, "left").astype(np.uint8)


def zero_code(signed: bool) -> int:
    return int(np.flatnonzero(dynamic_map(signed) == 0)[0])
