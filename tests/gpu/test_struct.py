"""Structs and tilings: declared once, written and read back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

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


OLD = [
    (
        {"rows": 16, "cols": 2, "span": 8, "wide": 1, "sg": 8, "lanes": 8},
        Tiling("broadcast", 8, rows=16, cols=2, span=8, wide=True),
    ),
    ({"rows": 8, "cols": 4, "span": 4, "wide": 0, "sg": 0, "lanes": 32}, Tiling("plain", 32, rows=8, cols=4, span=4)),
    ({"sg": 8, "lanes": 8, "wide": 0}, Tiling("broadcast", 8)),
    (
        {"sg": 32, "lanes": 32, "wide": 0, "queries": 1, "keys_per_step": 4},
        Tiling("broadcast", 32, rows=1, span=4),
    ),
]


@pytest.mark.parametrize(("old", "tiling"), OLD)
def test_tilings_are_read_as_they_are_written_and_as_0_1_wrote_them(old: Any, tiling: Tiling) -> None:
    assert Tiling.from_json(old) == Tiling.from_json(tiling.to_json()) == tiling
    assert tiling.subgroup == old["sg"]


NONE = [None, [], {"rows": 0}, {"rows": -1}, {"rows": "8"}, {"rows": True}, {"rows": 1 << 40}, {"depth": 1}]


@pytest.mark.parametrize("value", [*NONE, {"family": 3}, {"wide": 1}, {"sg": 8, "lanes": 0}])
def test_what_is_no_tiling_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="a tiling"):
        Tiling.from_json(value)
