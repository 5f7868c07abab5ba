"""What a device can do, and how a kernel's work is divided over it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

LARGEST = 1 << 16  # of any field: more could be no workgroup's
PLAIN = "plain"
SUBGROUPS = frozenset({"broadcast"})  # families whose workgroup is one subgroup


@dataclass(frozen=True)
class Capabilities:
    """What of a device decides which tilings of a kernel it can run, and which comes first.

    subgroup_size: lanes as measured, 0 where subgroups must not be used.
    f16, int64: shaders may have 16-bit floats, and 64-bit integers.
    workgroup_bytes: of memory that the threads of a workgroup share.
    software: a driver that runs on the CPU, whose costs are other than a GPU's.
    """

    subgroup_size: int
    f16: bool = False
    int64: bool = False
    workgroup_bytes: int = 16384  # WebGPU's default limit
    software: bool = False


@dataclass(frozen=True)
class Tiling:
    """One way to divide a call's work; templates see it as `tile`. What a kernel has no use for keeps its default.

    family: how threads work together, for a matrix product the file of its loops: `broadcast`, where a workgroup is one
        subgroup whose lanes share what they load, or `plain`, where each thread works by itself.
    lanes: threads of a workgroup.
    rows: of a workgroup's tile; in attention, queries a lane.
    cols: columns of the tile a lane; where a kernel has no columns, vectors a thread.
    span: steps of the contraction a round; in attention, keys a step.
    wide: reads 64-bit words, which halves the loads of drivers that make one of every scalar.
    """

    family: str = PLAIN
    lanes: int = 64
    rows: int = 1
    cols: int = 1
    span: int = 1
    wide: bool = False

    @property
    def subgroup(self) -> int:
        """Lanes that work together, 0 where each works by itself."""
        return self.lanes if self.family in SUBGROUPS else 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Tiling:
        """Of `to_json`, or of version 0.1's form (`sg` for the family). Raises ValueError where it is neither."""
        if not isinstance(value, dict):
            raise ValueError("a tiling is an object")
        known = _of_0_1(value) if "sg" in value else dict(value)
        if not known.keys() <= {field.name for field in fields(cls)}:
            raise ValueError("a tiling has other fields")
        family, wide = known.pop("family", PLAIN), known.pop("wide", False)
        if not isinstance(family, str) or not isinstance(wide, bool):
            raise ValueError("a tiling's family is a name, and wide true or false")
        if not all(type(size) is int and 0 < size <= LARGEST for size in known.values()):
            raise ValueError("a tiling's sizes are positive whole numbers")
        return cls(family, wide=wide, **known)


def _of_0_1(value: dict[str, Any]) -> dict[str, Any]:
    """Its lanes, where a subgroup's, were `sg` too; attention's rows and span had names of their own."""
    old = {"queries": "rows", "keys_per_step": "span"}
    known = {old.get(name, name): size for name, size in value.items() if name not in ("sg", "wide")}
    return known | {"family": "broadcast" if value["sg"] else PLAIN, "wide": bool(value.get("wide", 0))}
