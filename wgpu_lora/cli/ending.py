"""What commands say of how training ended, of one run and of several."""

from __future__ import annotations

CURES = "lower --learning-rate, or look for odd rows in the data"


def losses(trained: float | None, before: float | None, heldout: float | None) -> list[str]:
    """The training loss and the held-out loss, before and after, as far as they are known; none before a step."""
    if trained is None:
        return []
    first = "" if before is None else f" ({before:.4f} before)"
    return [f"loss {trained:.4f}", *([] if heldout is None else [f"held-out loss {heldout:.4f}{first}"])]
