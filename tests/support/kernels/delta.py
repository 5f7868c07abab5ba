"""Cases of the gated delta rule: sequences that begin and end within chunks of 64 rows, or go over several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from support.kernels import NONE, Arrays, add, normal, poison, u32
from wgpu_lora.ops.attention.delta_net import delta_chunks, delta_scan


def runs_of(*lengths: int, padding: int = 0, states: tuple[int, ...] = (), fresh: tuple[int, ...] = ()) -> np.ndarray:
    """The runs of sequences one after another. states: that of each; fresh: of these, those that begin with none."""
    rows = []
    for number, length in enumerate(lengths):
        state = states[number] if states else NONE
        goes_on = int(bool(states) and state not in fresh)
        rows += [(t, length - t, state, goes_on) for t in range(length)]
    return u32(*rows, *[(0, 1, NONE, 0)] * padding)


RUNS = runs_of(
    3, 70, 1, 90, padding=3
)  # 167 rows: three chunks; the second run goes into the second, the last into the third
ROWS = len(RUNS)
# two key heads, six value heads, of which the second block of three; 8 and 12 values a head
HEADS: dict[str, Any] = {"rows": ROWS, "first": 3, "heads": 3, "key_heads": 2, "value_heads": 6}
WHOLE: dict[str, Any] = {"rows": ROWS, "first": 0, "heads": 4, "key_heads": 4, "value_heads": 4}
KEY, VALUE = 8, 12


def size(of: str, c: dict[str, Any]) -> int:
    return int(c[{"key": "key_heads", "value": "value_heads", "block": "heads"}[of]])


def array(rng: np.random.Generator, of: str, dim: int, c: dict[str, Any]) -> np.ndarray:
    return normal(rng, ROWS, size(of, c), dim)


def decay(rng: np.random.Generator, c: dict[str, Any]) -> np.ndarray:
    """Sums of decays per token from nearly nothing to e^-20."""
    g = -np.exp(rng.uniform(-8, 3, (ROWS, c["value_heads"])))
    for start, stop in delta_chunks.pieces(RUNS, ROWS):
        g[start:stop] = g[start:stop].cumsum(axis=0)
    return g.astype(np.float32)


def beta(rng: np.random.Generator, c: dict[str, Any]) -> np.ndarray:
    return rng.random((ROWS, c["value_heads"]), np.float32)


def triangle(rng: np.random.Generator, c: dict[str, Any], strict: bool) -> np.ndarray:
    """As `delta_pairs` writes it, and of a size that its inverse stays small."""
    blocks = np.zeros((ROWS, c["heads"], 64), np.float32)
    for start, stop in delta_chunks.pieces(RUNS, ROWS):
        n, at = stop - start, start % 64
        part = np.where(delta_chunks.lower(n, strict)[..., None], normal(rng, n, n, c["heads"]), 0) / 8
        blocks[start:stop, :, at : at + n] = part.transpose(0, 2, 1)
    return blocks


def pairs(c: dict[str, Any], x_of: str, y_of: str, second: bool, strict: bool) -> None:
    def make(rng: np.random.Generator) -> Arrays:
        arrays = {
            "runs": RUNS,
            "x": array(rng, x_of, VALUE, c),
            "y": array(rng, y_of, VALUE, c),
            "decay": decay(rng, c),
        }
        if x_of == y_of == "key":
            del arrays["y"]
        if second:
            arrays |= {"x2": array(rng, "block", KEY, c), "y2": array(rng, "block", KEY, c)}
        if strict:
            arrays["beta"] = beta(rng, c)
        return {**arrays, "c": poison(ROWS, c["heads"], 64)}

    dims = {"dim": VALUE, "dim2": KEY if second else 0, "x_of": x_of, "y_of": y_of}
    add(delta_chunks.delta_pairs, make, **c, **dims, strict=strict, negative=second)


pairs(HEADS, "key", "key", False, True)
pairs(HEADS, "value", "block", False, False)
pairs(WHOLE, "block", "block", True, True)


def inverse(rng: np.random.Generator) -> Arrays:
    return {"runs": RUNS, "m": triangle(rng, HEADS, True), "t": poison(ROWS, HEADS["heads"], 64)}


add(delta_chunks.delta_inverse, inverse, **HEADS)


def mix(x_of: str, y_of: str, scales: str = "", **flags: bool) -> None:
    def make(rng: np.random.Generator) -> Arrays:
        arrays = {"runs": RUNS, "a": triangle(rng, HEADS, False), "x": array(rng, x_of, KEY, HEADS)}
        arrays |= {"beta": beta(rng, HEADS)} if "beta" in scales else {}
        arrays |= {"decay": decay(rng, HEADS)} if "decay" in scales else {}
        return {**arrays, "y": array(rng, y_of, KEY, HEADS)}

    add(delta_chunks.delta_mix, make, note=scales, **HEADS, dim=KEY, x_of=x_of, y_of=y_of, **flags)


mix("key", "block", "beta decay")
mix("value", "block", "beta")
mix("block", "value", accumulate=True)
mix("value", "block", transposed=True)
mix("key", "block", transposed=True, accumulate=True)


def scaled(y_of: str, decays: bool) -> None:
    def make(rng: np.random.Generator) -> Arrays:
        arrays = {"x": array(rng, "block", VALUE, HEADS), "beta": beta(rng, HEADS), "y": array(rng, y_of, VALUE, HEADS)}
        return arrays | ({"decay": decay(rng, HEADS)} if decays else {})

    c = {n: HEADS[n] for n in ("rows", "first", "heads", "value_heads")}
    add(delta_chunks.delta_scaled, make, **c, dim=VALUE, y_of=y_of)


scaled("value", False)
scaled("block", True)


def group_sum(second: bool) -> None:
    def make(rng: np.random.Generator) -> Arrays:
        arrays = {"x": array(rng, "block", KEY, HEADS), "y": array(rng, "key", KEY, HEADS)}
        return arrays | ({"x2": array(rng, "block", KEY, HEADS)} if second else {})

    add(delta_chunks.delta_group_sum, make, note="two" * second, **HEADS, dim=KEY)


group_sum(True)
group_sum(False)

QK = 2 * ROWS * HEADS["key_heads"] * KEY
PLACES = {"q_first": 4, "k_first": 4 + QK // 2 + 8}
DIMS = {"key_dim": KEY, "value_dim": VALUE}


def qk(rng: np.random.Generator) -> np.ndarray:
    return normal(rng, QK + 12)


def sums(rng: np.random.Generator) -> Arrays:
    arrays = {"qk": qk(rng), "v": array(rng, "value", VALUE, HEADS)}
    arrays |= {name: array(rng, "block", KEY, HEADS) for name in ("dq", "dk", "dk_behind")}
    return {**arrays, "dv": array(rng, "value", VALUE, HEADS), "sums": poison(ROWS, HEADS["heads"], 2)}


add(delta_chunks.delta_sums, sums, **HEADS, **PLACES, **DIMS)


def states(rng: np.random.Generator, count: int = 3) -> np.ndarray:
    return normal(rng, count, HEADS["heads"], KEY, VALUE)


def scan(rng: np.random.Generator) -> Arrays:
    before = states(rng)
    before[0] = np.nan  # no sequence comes from before the first chunk
    block = {"u": array(rng, "block", VALUE, HEADS), "w": array(rng, "block", KEY, HEADS)}
    block |= {"states": before, "v": poison(ROWS, HEADS["heads"], VALUE)}
    return {"runs": RUNS, **block, "qk": qk(rng), "decay": decay(rng, HEADS), "y": array(rng, "value", VALUE, HEADS)}


def without(make: Callable[[np.random.Generator], Arrays], *names: str) -> Callable[[np.random.Generator], Arrays]:
    return lambda rng: {n: a for n, a in make(rng).items() if n not in names}


add(delta_scan.delta_scan, scan, **HEADS, **PLACES, **DIMS)
add(delta_scan.delta_scan, without(scan, "qk", "decay", "y"), **HEADS, **DIMS, given=True)

GENERATING = {**HEADS, "first": 0, "heads": 6}
KEPT = runs_of(3, 70, 1, 90, padding=3, states=(4, 1, 0, 2), fresh=(1,))


def scan_of_a_cache(rng: np.random.Generator) -> Arrays:
    """Sequence 1 begins, the others go on, and 3 has no rows."""
    cached_states = normal(rng, 5, 6, KEY, VALUE)
    cached_states[1] = np.nan
    arrays = {
        "runs": KEPT,
        "u": normal(rng, ROWS, 6, VALUE),
        "w": normal(rng, ROWS, 6, KEY) / 4,
        "states": cached_states,
    }
    arrays |= {"v": poison(ROWS, 6, VALUE), "qk": qk(rng), "decay": decay(rng, GENERATING)}
    return {**arrays, "y": poison(ROWS, 6, VALUE)}


add(delta_scan.delta_scan, scan_of_a_cache, **GENERATING, **PLACES, **DIMS, sequences=5, cached=True)


def scan_backward(rng: np.random.Generator) -> Arrays:
    arrays = {"runs": RUNS, "w": array(rng, "block", KEY, HEADS), "qk": qk(rng), "decay": decay(rng, HEADS)}
    arrays |= {"dy": array(rng, "value", VALUE, HEADS), "dv": array(rng, "block", VALUE, HEADS)}
    return {**arrays, "dstates": states(rng)}


add(delta_scan.delta_scan_backward, scan_backward, **HEADS, **PLACES, **DIMS)


def through(x_of: str, decays: bool, **flags: bool) -> None:
    def make(rng: np.random.Generator) -> Arrays:
        arrays = {"runs": RUNS, "x": array(rng, x_of, VALUE, HEADS), "states": states(rng)}
        arrays |= {"decay": decay(rng, HEADS)} if decays else {}
        return {**arrays, "y": array(rng, "block", KEY, HEADS)}

    add(delta_scan.delta_through, make, **HEADS, **DIMS, x_of=x_of, **flags)


through("block", False, negative=True)
through("value", True, accumulate=True)
through("block", True, behind=True, accumulate=True)


def flow(rng: np.random.Generator) -> Arrays:
    heads = HEADS["heads"]
    return {"runs": RUNS, "states": states(rng), "dstates": states(rng), "y": poison(3, heads)}


add(delta_scan.delta_flow, flow, rows=3 * HEADS["heads"], heads=HEADS["heads"], cols=KEY * VALUE, last=2)


def gates(rng: np.random.Generator) -> Arrays:
    """a from where softplus is nearly 0 to where it is nearly a."""
    a, per_head = 12 * normal(rng, ROWS, 6), {"a_log": normal(rng, 6), "dt_bias": normal(rng, 6)}
    return {
        "runs": RUNS,
        "a": a,
        "b": 4 * normal(rng, ROWS, 6),
        **per_head,
        "beta": poison(ROWS, 6),
        "decay": poison(ROWS, 6),
    }


add(delta_scan.delta_gates, gates, rows=ROWS, heads=6)


def gates_backward(rng: np.random.Generator) -> Arrays:
    arrays = without(gates, "b", "beta", "decay")(rng)
    return {**arrays, "sums": normal(rng, ROWS, 3, 2), "flow": normal(rng, 3, 3), "da": normal(rng, ROWS, 6)}


BLOCK = {n: HEADS[n] for n in ("rows", "first", "heads", "value_heads")}
add(delta_scan.delta_gates_backward, gates_backward, **BLOCK)


def beta_gradient(rng: np.random.Generator) -> Arrays:
    return {"b": 4 * normal(rng, ROWS, 6), "sums": normal(rng, ROWS, 3, 2), "db": normal(rng, ROWS, 6)}


add(delta_scan.delta_beta_gradient, beta_gradient, **BLOCK)
