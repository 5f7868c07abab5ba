"""Refusals: what the broker answers when it releases nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.protect.policies.result import Failure
from wgpu_lora.text import escape_unprintable

LONGEST, MOST = 200, 20  # characters of a value, and failures, in a log or an answer


class Refused(UserError):
    """A request that the broker refuses.

    Attributes:
        status: of the HTTP response. failures: the rules that failed, each with `rule`, `expected` and `found`.
    """

    def __init__(self, sentence: str, failures: Sequence[Failure] = (), status: int = 403) -> None:
        self.failures = [listed(failure) for failure in failures[:MOST]]
        super().__init__(sentence, [in_words(failure) for failure in self.failures])
        self.status = status


def listed(failure: Failure) -> dict[str, str]:
    """A failure for logs and answers. Values from evidence are untrusted: they are shortened and made printable."""
    return {name: escape_unprintable(value)[:LONGEST] for name, value in failure.as_dict().items()}


def in_words(failure: dict[str, Any]) -> str:
    """A line about a failure as `listed` makes it."""
    return f"{failure['rule']}: expected {failure['expected']}, found {failure['found']}"
