"""The capabilities of a device, and the tilings that divide a kernel's work over it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np

from wgpu_lora.gpu.backends import MatrixConfiguration

LARGEST = 1 << 16  # sanity limit for the sizes in untrusted JSON
PLAIN, WORKGROUP, MATRIX = "plain", "workgroup", "matrix"
SUBGROUPS = frozenset({"broadcast", "thin", "few", "spread"})  # families whose workgroup is one subgroup


@dataclass(frozen=True)
class Capabilities:
    """The properties of a device that decide which tilings a kernel can use, and which is the default.

    subgroup_size: measured number of lanes, or 0 if subgroups must not be used.
    f16, int64: whether shaders may use 16-bit floats and 64-bit integers.
    workgroup_bytes, threads: of a workgroup, at most.
    software: whether the driver runs on the CPU.
    registers: 32-bit values that a lane can hold before a compiler spills them to memory.
    matrix: the product of f16 matrices, with sums in f32 or else f16, that the device has units for, or None.
    decoding: of a program, whether a row's results must not depend on how many rows there are.
    """

    subgroup_size: int
    f16: bool = False
    int64: bool = False
    workgroup_bytes: int = 16384  # WebGPU's default limits
    threads: int = 256
    software: bool = False
    registers: int = 256
    matrix: MatrixConfiguration | None = None
    decoding: bool = False

    @property
    def units(self) -> str:
        """What computes, in words: the size of subgroups, and of the products of matrix units."""
        subgroups = f"subgroups of {self.subgroup_size}" if self.subgroup_size else "no subgroups"
        return subgroups + (f", matrix units of {self.matrix.m}x{self.matrix.n}x{self.matrix.k}" if self.matrix else "")

    def operand_dtype(self, compute_dtype: str) -> str:
        """What the inputs of frozen products are rounded to: f16 instead of bf16 where that is what units multiply."""
        return "f16" if compute_dtype == "bf16" and self.matrix else compute_dtype


@dataclass(frozen=True)
class Tiling:
    """One way to divide a call's work; `tile` in templates. Fields that a kernel does not use keep their defaults.

    family: `broadcast`, `thin`, `few` and `spread`, where a workgroup is one subgroup whose lanes share their loads,
        `workgroup`, whose threads share them through workgroup memory, `matrix`, the same for matrix units, or `plain`,
        where each loads for itself. A file in `shaders/matmul/families/`, or directory in `shaders/attention/`. `thin`
        is `broadcast` with y's rows and columns exchanged, `few` is `plain` in slices.
    lanes: threads per workgroup.
    rows: rows of a workgroup's tile; of a lane, in attention by `broadcast` and `plain`.
    cols: columns per lane; in attention, columns of a vector; in kernels without columns, vectors per thread.
    slices: parts of the contraction that a workgroup's lanes, or subgroups, compute at the same time.
    span: contraction steps per round; in attention, rows of the other side per step, or per lane and step.
    wide: whether to use 64-bit loads, which is faster where a driver loads every scalar separately.
    subgroups, m, n, k: of `matrix`, subgroups of a workgroup, and the sizes of their products.
    sums: of `matrix`, the type of the products. f16 is added to f32 sums after every round.
    """

    family: str = PLAIN
    lanes: int = 64
    rows: int = 1
    cols: int = 1
    span: int = 1
    slices: int = 1
    wide: bool = False
    subgroups: int = 1
    m: int = 1
    n: int = 1
    k: int = 1
    sums: str = "f32"

    @property
    def subgroup(self) -> int:
        """Lanes that share their loads, or 0."""
        return self.lanes if self.family in SUBGROUPS else 0

    @property
    def shares_memory(self) -> bool:
        """Whether a workgroup's threads load for each other, and decode eight values at a time."""
        return self.family in (WORKGROUP, MATRIX)

    @property
    def width(self) -> int:
        """Threads of a workgroup that own different columns of a product."""
        if self.shares_memory:
            return 1 << (self.lanes.bit_length() // 2)
        return self.lanes // self.slices

    @property
    def height(self) -> int:
        """Threads of a workgroup that own different rows of a product."""
        return self.lanes // self.slices // self.width

    @property
    def label(self) -> str:
        """Its name in messages: family and lanes, rows x columns by span, slices, and whether loads are wide."""
        tile = f"{self.family}-{self.lanes}-{self.rows}x{self.cols}x{self.span}{'-f16' if self.sums == 'f16' else ''}"
        return tile + (f"-slices{self.slices}" if self.slices > 1 else "") + ("-wide" if self.wide else "")

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if (name, value) != ("sums", "f32")}

    @classmethod
    def from_json(cls, value: Any) -> Tiling:
        """Reads `to_json`'s form or that of version 0.1 (`sg` for the family). Raises ValueError if it is neither."""
        if not isinstance(value, dict):
            raise ValueError("a tiling must be a JSON object")
        arguments = _of_0_1(value) if "sg" in value else dict(value)
        if not arguments.keys() <= {field.name for field in fields(cls)}:
            raise ValueError("a tiling has unknown fields")
        family, wide, sums = arguments.pop("family", PLAIN), arguments.pop("wide", False), arguments.pop("sums", "f32")
        if not isinstance(family, str) or not isinstance(wide, bool) or sums not in ("f32", "f16"):
            raise ValueError("a tiling's family must be a string, wide a boolean, and sums f32 or f16")
        if not all(type(size) is int and 0 < size <= LARGEST for size in arguments.values()):
            raise ValueError("a tiling's sizes must be positive integers")
        return cls(family, wide=wide, sums=sums, **arguments)


def _of_0_1(value: dict[str, Any]) -> dict[str, Any]:
    """Fields from those of version 0.1, where `sg` was the subgroup size or 0, and attention had names of its own."""
    old = {"queries": "rows", "keys_per_step": "span"}
    result = {old.get(name, name): size for name, size in value.items() if name not in ("sg", "wide")}
    return result | {"family": "broadcast" if value["sg"] else PLAIN, "wide": bool(value.get("wide", 0))}


Arrays = dict[str, np.ndarray]
Constants = dict[str, Any]  # of a call: the kernel's keyword parameters


class Tunable(Protocol):
    """Declared with a kernel that is worth tuning: `@kernel(..., tuning=...)`.

    sizes: the dims that choices are keyed by, each rounded to the nearest power of two.
    later: constants that were added after choices had been saved, with defaults that change nothing.
    """

    @property
    def sizes(self) -> tuple[str, ...]: ...

    @property
    def later(self) -> tuple[str, ...]: ...

    def work(self, c: Constants) -> float:
        """Multiply-adds of a call. The heaviest calls are tuned first."""

    def cut(self, c: Constants, tiling: Tiling) -> Constants:
        """A call that compiles to the same shader and is small enough to be compared with the float64 reference. It has
        whole blocks of the tiling, and a block that its edge cuts where the call has one."""

    def inputs(self, c: Constants, present: tuple[str, ...], rng: np.random.Generator) -> Arrays:
        """Synthetic arrays for the bindings `present`, including outputs."""
