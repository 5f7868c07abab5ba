"""Structs declared once for Python and WGSL."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from wgpu_lora.gpu.kernel import F32, U32
from wgpu_lora.gpu.struct import struct_array, struct_columns, struct_words, wgsl_struct
from wgpu_lora.gpu.tiling import Tiling
from wgpu_lora.ops.elementwise import fill


@dataclass(frozen=True)
class Rates:
    fast: F32 = 0.25
    slow: F32 = 0.0


@dataclass(frozen=True)
class Mixed:
    rate: F32
    count: U32


def test_one_declaration_gives_text_bytes_and_columns() -> None:
    assert wgsl_struct(Mixed) == "struct Mixed { rate: f32, count: u32 }\n"
    call = (("y",), {"size": 7}, Tiling())
    assert replace(fill, structs=(Rates,)).source(*call) == f"{wgsl_struct(Rates)}\n{fill.source(*call)}"
    assert struct_words(Rates) == 2
    rates = struct_array(Rates, [Rates(slow=0.5), None])
    np.testing.assert_array_equal(rates, np.array([[0.25, 0.5], [0, 0]], np.float32))
    assert rates.dtype == np.float32
    assert struct_columns(Rates, rates.astype(np.float64)).slow.tolist() == [0.5, 0]
    mixed = struct_array(Mixed, [Mixed(0.5, 2**32 - 1)])
    assert (mixed.dtype, mixed.shape) == (np.uint32, (1, 2))
    columns = struct_columns(Mixed, mixed)
    assert (columns.rate[0], columns.count[0]) == (0.5, 2**32 - 1)


def test_other_annotations_are_refused() -> None:
    @dataclass
    class Wrong:
        name: str

    with pytest.raises(TypeError, match="Wrong: name must be annotated as F32"):
        wgsl_struct(Wrong)
