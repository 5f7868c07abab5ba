"""Structs of 32-bit scalars, declared once as a dataclass, for WGSL, for buffers and for references.

@dataclass(frozen=True)
class Hyper:
    learning_rate: F32 = 0.0
    enabled: F32 = 0.0

@kernel("adamw.wgsl", grid=..., structs=(Hyper,))  # prepends the WGSL declaration to the shader
def adamw(..., hyper: ReadOnly, ...): ...

array = struct_array(Hyper, [Hyper(learning_rate=1e-3), None])  # rows for the device; None gives zeros
columns = struct_columns(Hyper, array)                          # columns.learning_rate is float64 [2]
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import astuple, fields
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

SCALARS = {"f32": np.float32, "u32": np.uint32, "i32": np.int32}


@cache
def struct_fields(record: type) -> dict[str, str]:
    """Field -> f32, u32 or i32, in order. Raises TypeError if a field has another annotation."""
    hints = typing.get_type_hints(record, include_extras=True)
    kinds = {field.name: (getattr(hints[field.name], "__metadata__", None) or ("",))[0] for field in fields(record)}
    wrong = [name for name, kind in kinds.items() if kind not in SCALARS]
    if wrong:
        raise TypeError(f"{record.__name__}: {', '.join(wrong)} must be annotated as F32, U32 or I32")
    return kinds


def struct_words(record: type) -> int:
    """Size of the struct in 32-bit words. Structs of scalars need no padding in a storage buffer."""
    return len(struct_fields(record))


def wgsl_struct(record: type) -> str:
    """The WGSL declaration of the struct, with the dataclass's name."""
    body = ", ".join(f"{name}: {kind}" for name, kind in struct_fields(record).items())
    return f"struct {record.__name__} {{ {body} }}\n"


def struct_array(record: type, rows: Sequence[Any]) -> np.ndarray:
    """Packs instances into an array [rows, words]: float32 if all fields are F32, otherwise uint32 bits.

    None gives a row of zeros.
    """
    kinds = struct_fields(record)
    table = np.zeros(len(rows), np.dtype([(name, SCALARS[kind]) for name, kind in kinds.items()]))
    for at, row in enumerate(rows):
        if row is not None:
            table[at] = astuple(row)
    element = np.float32 if set(kinds.values()) == {"f32"} else np.uint32
    return table.view(element).reshape(len(rows), len(kinds))


def struct_columns(record: type, array: np.ndarray) -> SimpleNamespace:
    """The columns of a `struct_array`, which may be widened to float64, by field name. F32 columns become float64."""
    kinds = struct_fields(record)
    words = array.reshape(-1, len(kinds))
    columns = {}
    for at, (name, kind) in enumerate(kinds.items()):
        column = words[:, at]
        if words.dtype == np.uint32:
            column = np.ascontiguousarray(column).view(SCALARS[kind])
        columns[name] = column.astype(np.float64) if kind == "f32" else column
    return SimpleNamespace(**columns)
