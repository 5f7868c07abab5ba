"""What another thread asks of a run while it trains."""

from __future__ import annotations


class Requests:
    """Names of adapters to end, which the trainer looks up between steps. A single run has the name None."""

    def __init__(self) -> None:
        self._ending: set[str | None] = set()

    def end(self, name: str | None) -> None:
        """End an adapter after the current step, with its results; the others of its pipeline go on."""
        self._ending.add(name)

    def ending(self, name: str | None) -> bool:
        """Whether an adapter was asked to end."""
        return name in self._ending
