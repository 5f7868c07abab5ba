"""Text about the end of training, for one run and for several."""

from __future__ import annotations

CURES = "lower --learning-rate, or check the data for unusual rows"


def losses(trained: float | None, before: float | None, heldout: float | None) -> list[str]:
    """The training loss and the held-out loss (before and after) if known, as text; empty before the first step."""
    if trained is None:
        return []
    first = "" if before is None else f" ({before:.4f} before)"
    return [f"loss {trained:.4f}", *([] if heldout is None else [f"held-out loss {heldout:.4f}{first}"])]
