"""Tilings as runs and caches keep them."""

from __future__ import annotations

from typing import Any

import pytest

from wgpu_lora.gpu.tiling import Tiling

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
