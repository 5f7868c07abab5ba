"""pass@k: the chance that at least one of k samples passes, estimated from n samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.names.naming import flag

MAX_SAMPLES = 10_000


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k) of n samples of which c passed, unbiased (Chen et al. 2021, equation 1).

    The quotient is the product of 1 - k/i over n - c < i <= n, so that no factorial overflows.
    """
    assert 0 <= passed <= samples, f"{passed} of {samples} samples"
    assert 1 <= k <= samples, f"k = {k} of {samples} samples"
    if samples - passed < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(samples - passed + 1, samples + 1)))


def mean_pass_at_k(passed: Iterable[int], samples: int, k: int) -> float:
    """The mean over rows, of each of which `samples` were drawn."""
    return float(np.mean([pass_at_k(samples, one, k) for one in passed]))


def parse_ks(text: str | int | Sequence[int], samples: int) -> list[int]:
    """The values of k in a text such as "1,5", ascending.

    Raises:
        UserError: one is not a number from 1 to `samples`.
    """
    name = flag("pass_at_k")
    if not 1 <= samples <= MAX_SAMPLES:
        raise UserError(f"{flag('samples')} must be from 1 to {MAX_SAMPLES:,}, not {samples:,}.")
    parts = text.split(",") if isinstance(text, str) else [text] if isinstance(text, int) else list(text)
    try:
        found = sorted({int(part) for part in parts})
    except (TypeError, ValueError):
        raise UserError(f"{name} must be numbers such as 1,5, not {text!r:.60}.") from None
    if not found or found[0] < 1:
        raise UserError(f"{name} must be numbers from 1, not {text!r:.60}.")
    if found[-1] > samples:
        raise UserError(
            f"{name} {found[-1]} needs at least {found[-1]:,} samples per row, but {flag('samples')} is {samples:,}: "
            "draw more, or leave it out."
        )
    return found
