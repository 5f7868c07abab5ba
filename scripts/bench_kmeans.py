"""Times the fit of lookup tables on the device beside k-means of scikit-learn and of NumPy, on the shape of a model.

    python -m scripts.bench_kmeans --bits 2 --group 32 --rows 64 --rounds 3

All three fit the same values: normally distributed weights divided by the largest magnitude of their group, weighted by
its square, with a table per row. The device fits whole matrices, with refitted scales, rounding and packing.
scikit-learn, on one thread, and NumPy fit only the tables, of the first rows of each matrix, and their times are
multiplied up. Rounds alternate between the three. What is printed are medians, and the error of the same rows relative
to their own square. scikit-learn is not among the dependencies: install it first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import allocate, release
from wgpu_lora.models.published_shapes import shape_config
from wgpu_lora.weights.base import Loading, Shared
from wgpu_lora.weights.base_formats import base_format
from wgpu_lora.weights.lowbit.lowbit_layout import Scheme


@dataclass(frozen=True)
class Given:
    """A matrix as the part of a checkpoint that is loaded."""

    w: np.ndarray

    def dtype(self, name: str) -> str:
        return "F32"

    def read_raw(self, name: str, row_start: int = 0, row_stop: int | None = None) -> np.ndarray:
        return self.w[row_start:row_stop]

    read_f32 = read_raw

    def packed(self, name: str) -> None:
        return None


def normalised(w: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """The values that k-means fits, and the scale of each, [rows, in]."""
    if not group:
        return w, np.ones_like(w)
    largest = np.abs(w.reshape(len(w), -1, group)).max(axis=2)
    scales = np.repeat(largest, group, axis=1)
    return w / scales, scales


def with_sklearn(w: np.ndarray, bits: int, group: int) -> np.ndarray:
    from sklearn.cluster import KMeans  # type: ignore[import-not-found]
    from threadpoolctl import threadpool_limits  # type: ignore[import-not-found]

    x, scales = normalised(w, group)
    found = np.empty_like(w)
    with threadpool_limits(1):  # faster for the few values of a row
        for row, (values, own) in enumerate(zip(x, scales, strict=True)):
            fitted = KMeans(2**bits, random_state=row).fit(values[:, None], sample_weight=own**2)
            found[row] = own * fitted.cluster_centers_[fitted.labels_, 0]
    return found


def with_numpy(w: np.ndarray, bits: int, group: int, iterations: int = 20) -> np.ndarray:
    """Lloyd's algorithm from quantiles, on all rows at once."""
    x, scales = normalised(w, group)
    mass, count = scales**2, 2**bits
    centres = np.quantile(x, (np.arange(count) + 0.5) / count, axis=1).T.copy()
    rows = np.arange(len(w))[:, None]
    for _ in range(iterations):
        between = (centres[:, 1:] + centres[:, :-1]) / 2
        codes = (x[:, :, None] > between[:, None]).sum(axis=2)
        flat = (codes + count * rows).reshape(-1)
        masses = np.bincount(flat, mass.reshape(-1), centres.size).reshape(centres.shape)
        moments = np.bincount(flat, (mass * x).reshape(-1), centres.size).reshape(centres.shape)
        centres = np.where(masses > 0, moments / np.maximum(masses, 1e-30), centres)
    codes = (x[:, :, None] > ((centres[:, 1:] + centres[:, :-1]) / 2)[:, None]).sum(axis=2)
    return np.asarray(scales * np.take_along_axis(centres, codes, axis=1))


class OnDevice:
    """A matrix that is quantised while it is loaded, as by --base-dtype."""

    def __init__(self, device: Device, w: np.ndarray, scheme: Scheme):
        self.device, self.given = device, Given(w)
        self.weight = base_format(scheme.name).declare(w.shape, "w", Shared(device.max_binding))
        allocate(device, set(self.weight.storages()))

    def load(self) -> None:
        with Loading(self.device, [self.weight]) as loading:
            self.weight.load(loading, self.given, "w")

    def values(self) -> np.ndarray:
        return self.weight.values(self.device)

    def free(self) -> None:
        release(self.device, set(self.weight.storages()))


def timed(work: Callable[[], np.ndarray | None]) -> tuple[np.ndarray | None, float, float]:
    """(result, seconds, processor seconds)"""
    begin, processor = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - begin, time.process_time() - processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--bits", type=int, default=2, choices=(2, 3, 4))
    parser.add_argument("--group", type=int, default=32, help="0: a table per row, without scales")
    parser.add_argument("--rows", type=int, default=64, help="of each matrix, for scikit-learn and NumPy")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    device, rng = Device(None), np.random.default_rng(0)
    shapes = Counter(shape_config(args.shape).matrices().values())
    names = ("device", "scikit-learn", "numpy")
    seconds, processor, errors = (dict.fromkeys(names, 0.0) for _ in range(3))
    with_sklearn(rng.standard_normal((2, 64)).astype(np.float32), args.bits, args.group)  # imports
    squares, matrices = 0.0, sum(shapes.values())
    for (out, size_in), count in sorted(shapes.items()):
        w = (0.02 * rng.standard_normal((out, size_in))).astype(np.float32)
        sample, ours = w[: args.rows], OnDevice(device, w, Scheme(args.bits, args.group))
        ours.load()  # compiles the kernels and checks them
        work: dict[str, Callable[[], np.ndarray | None]] = {
            "device": ours.load,
            "scikit-learn": partial(with_sklearn, sample, args.bits, args.group),
            "numpy": partial(with_numpy, sample, args.bits, args.group),
        }
        found: dict[str, list[tuple[np.ndarray | None, float, float]]] = {name: [] for name in names}
        for _ in range(args.rounds):
            for name in names:
                found[name].append(timed(work[name]))
        squares += count * float((sample.astype(np.float64) ** 2).sum())
        for name in names:
            rows = 1.0 if name == "device" else out / len(sample)
            seconds[name] += count * rows * statistics.median(run[1] for run in found[name])
            processor[name] += count * rows * statistics.median(run[2] for run in found[name])
            result = found[name][-1][0]
            values = ours.values()[: len(sample)] if result is None else result
            errors[name] += count * float(((sample - values) ** 2).sum())
        ours.free()
    weights = sum(count * prod(shape) for shape, count in shapes.items())
    what = f"{matrices} matrices of {args.shape}, {weights:,} weights, {args.bits} bits, group {args.group}"
    print(f"{device.info.name}: {what}")
    for name in names:
        print(
            f"{name:13} {seconds[name]:9.1f} s  {processor[name]:9.1f} s of processors  relative error "
            f"{errors[name] / squares:.6f}  {seconds[name] / seconds['device']:.1f} times the device's time, "
            f"{processor[name] / processor['device']:6.1f} times its processor time"
        )


if __name__ == "__main__":
    main()
