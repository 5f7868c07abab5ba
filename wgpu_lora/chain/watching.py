"""How the progress of a whole chain is shown."""

from __future__ import annotations

from wgpu_lora.chain.file import Link
from wgpu_lora.chain.watch import Watch


class ChainWatch(Watch):
    """Also hears which stages run."""

    def stage(self, number: int, link: Link, why: str, seconds: float | None) -> None:
        """A stage begins. seconds: that it and those after it took when they last ran, None if not all are known."""

    def skipped(self, number: int, link: Link) -> None:
        """A stage is up to date."""

    def finished(self, number: int, link: Link, seconds: float) -> None:
        """A stage has run."""
