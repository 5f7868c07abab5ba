"""What a prepared run needs and is made of, for programs that decide where it runs."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Needs:
    """What a run needs on its device.

    Attributes:
        needed: bytes at the peak, by the exact plan. base_bytes: those of the base model's weights.
        base: a digest of the base model, then one of the options that adapters of one pipeline must share. Equal for
            runs that may be joined.
        data: digests of the encoded rows, and of the held-out ones.
        work: processed tokens of the whole run. steps: of the whole run. Both are 0 if it ends by time.
        heldout: whether a held-out loss is measured.
        refused: why it cannot run, a sentence; the other values are 0 then.
    """

    needed: int = 0
    base_bytes: int = 0
    base: str = ""
    data: list[str] = field(default_factory=list)
    work: int = 0
    steps: int = 0
    heldout: bool = False
    refused: str | None = None
