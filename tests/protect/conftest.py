from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from wgpu_lora.protect.hygiene.memory_protection import HostProtection


@pytest.fixture(autouse=True)
def unprotected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands protect their process until it ends, and this one runs other tests."""
    made, begin = list[HostProtection](), HostProtection.__init__

    def remembered(self: HostProtection, *args: Any, **given: Any) -> None:
        begin(self, *args, **given)
        made.append(self)

    monkeypatch.setattr(HostProtection, "__init__", remembered)
    yield
    for one in reversed(made):
        one.restore()
