"""How the factors of a new adapter begin, by PEFT's names (--init-lora-weights), one function each.

A function gets a module's shape, or its weight W [out, in], the rank, the scaling s and a generator of the module's
own, and returns A [rank, in] and B [out, rank]. If they are computed from W, s B A is a part of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.names.spelling import flag, setting

DEFAULT = "true"
NITER = re.compile(r"pissa_niter_([1-9][0-9]{0,2})", re.ASCII)
OVERSAMPLING = 8  # columns beyond the rank in randomised subspace iteration
Factors = tuple[np.ndarray, np.ndarray]


def uniform(shape: tuple[int, int], rank: int, rng: np.random.Generator) -> Factors:
    """A uniform within 1 / sqrt(in), as Kaiming's with a = sqrt(5), B zero."""
    out, size_in = shape
    return rng.uniform(-1, 1, (rank, size_in)) / np.sqrt(size_in), np.zeros((out, rank))


def gaussian(shape: tuple[int, int], rank: int, rng: np.random.Generator) -> Factors:
    """A normal with a standard deviation of 1 / rank, B zero."""
    out, size_in = shape
    return rng.standard_normal((rank, size_in)) / rank, np.zeros((out, rank))


def orthogonal(shape: tuple[int, int], rank: int, rng: np.random.Generator) -> Factors:
    """A and B with B A = 0, from the even and odd rows of an orthogonal matrix (Büyükakyüz 2025); the rank is even."""
    out, size_in = shape
    q, _ = np.linalg.qr(rng.standard_normal((rank, rank)))
    a = rng.standard_normal((size_in, rank // 2)) @ q[0::2] / 10
    return a.T, rng.standard_normal((rank // 2, out)).T @ q[1::2] / 10


def pissa(w: np.ndarray, rank: int, scaling: float, rng: np.random.Generator, iterations: int = 0) -> Factors:
    """The largest singular values and their vectors, shared equally by A and B (Meng et al. 2024).

    iterations: of randomised subspace iteration (Halko et al. 2011); 0 is exact.
    """
    u, s, vt = subspace(w, rank, iterations, rng) if iterations else largest(w, rank)
    root = np.sqrt(s / scaling)
    return root[:, None] * vt, u * root


def olora(w: np.ndarray, rank: int, scaling: float, rng: np.random.Generator) -> Factors:
    """The first columns of Q and rows of R in W = Q R (Büyükakyüz 2024). As in PEFT, s B A is s times that part."""
    q, _ = np.linalg.qr(w[:, :rank].astype(np.float64))
    return q.T @ w, q


def loftq(residual: np.ndarray, rank: int, scaling: float, rng: np.random.Generator) -> Factors:
    """The largest singular values of W minus the quantised W (Li et al. 2023, one iteration).

    PEFT leaves the scaling out; here, as with PiSSA, s B A is what approximates it, whatever alpha is.
    """
    return pissa(residual, rank, scaling, rng)


FROM_SHAPE: dict[str, Callable[[tuple[int, int], int, np.random.Generator], Factors]] = {
    DEFAULT: uniform,
    "gaussian": gaussian,
    "orthogonal": orthogonal,
}
FROM_WEIGHT: dict[str, Callable[[np.ndarray, int, float, np.random.Generator], Factors]] = {
    "pissa": pissa,
    "olora": olora,
    "loftq": loftq,
}


class Initialisations(Collection[str]):
    """The values of --init-lora-weights: the names above, and pissa_niter_N."""

    names = (*FROM_SHAPE, *FROM_WEIGHT, "pissa_niter_16")

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self.names or bool(NITER.fullmatch(name)))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


INITIALISATIONS = Initialisations()


def offsets(name: str) -> bool:
    """Whether the initial product is subtracted from the weight, so that the model begins as the base."""
    return name == "olora" or name.startswith("pissa")


def check_initialisation(name: str, rank: int, use_dora: bool, init_adapter: str | None) -> None:
    """Raise UserError if an initialisation cannot be combined with other options."""
    text = setting("init_lora_weights", name)
    if name != DEFAULT and init_adapter:
        raise UserError(
            f"{text} and {flag('init_adapter')} cannot be combined: the adapter has values already, so leave one out."
        )
    if use_dora and offsets(name):
        raise UserError(f"{text} and {flag('use_dora')} cannot be combined: leave one of them out.")
    if name == "orthogonal" and rank % 2:
        raise UserError(f"{text} needs an even rank: use {setting('lora_r', rank + 1)}.")


def from_weight(name: str, w: np.ndarray, rank: int, scaling: float, rng: np.random.Generator) -> Factors:
    """The factors of a module, float32, from its weight or, for loftq, its residual.

    What a matrix smaller than the rank lacks is zero.
    """
    result, fits = NITER.fullmatch(name), min(rank, *w.shape)
    a, b = pissa(w, fits, scaling, rng, int(result[1])) if result else FROM_WEIGHT[name](w, fits, scaling, rng)
    factors = np.zeros((rank, w.shape[1]), np.float32), np.zeros((w.shape[0], rank), np.float32)
    factors[0][:fits], factors[1][:, :fits] = a, b
    return factors


def largest(w: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The largest singular triplets (u [out, count], s, vt [count, in]), float64.

    From the eigenvectors of the smaller of W W^T and W^T W, which took a fifth of the time of `numpy.linalg.svd`.
    """
    m = w.astype(np.float64)
    wide = m.shape[0] <= m.shape[1]
    _, vectors = np.linalg.eigh(m @ m.T if wide else m.T @ m)
    top = vectors[:, ::-1][:, :count]
    projection = (m.T if wide else m) @ top
    s = np.linalg.norm(projection, axis=0)
    projection = projection / np.where(s == 0, 1, s)
    return (top, s, projection.T) if wide else (projection, s, top.T)


def subspace(
    w: np.ndarray, count: int, iterations: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """About the largest singular triplets, by randomised subspace iteration."""
    width = min(count + OVERSAMPLING, *w.shape)
    q, _ = np.linalg.qr(w @ rng.standard_normal((w.shape[1], width), np.float32))
    for _ in range(iterations):
        q, _ = np.linalg.qr(w.T @ q)
        q, _ = np.linalg.qr(w @ q)
    u, s, vt = np.linalg.svd(q.T @ w, full_matrices=False)
    return (q @ u)[:, :count], s[:count], vt[:count]
