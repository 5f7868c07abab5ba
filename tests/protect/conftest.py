from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.protect.brokers import Owner

from wgpu_lora.protect.memory_protection import HostProtection


@pytest.fixture(autouse=True)
def unprotected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands protect their process until it ends, and this one runs other tests."""
    protections, begin = list[HostProtection](), HostProtection.__init__

    def remembered(self: HostProtection, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        protections.append(self)

    monkeypatch.setattr(HostProtection, "__init__", remembered)
    yield
    for protection in reversed(protections):
        protection.restore()


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    return Owner(tmp_path)
