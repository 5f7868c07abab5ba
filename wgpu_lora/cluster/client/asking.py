"""What the driver asks a cluster for, as an interface: by `Bridge`, or by something that stands in for it."""

from __future__ import annotations

from typing import Any, Protocol


class Asking(Protocol):
    """Calls of the coordinator and of host actors; `client.bridge.Bridge` says what they raise."""

    def call(self, actor: str, method: str, *args: Any, data: bytes | None = None, seconds: float = ...) -> Any: ...

    def coordinator(self, method: str, *args: Any, seconds: float = ...) -> Any: ...
