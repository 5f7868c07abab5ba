"""What is left of an answer without its reasoning."""

from __future__ import annotations

from wgpu_lora.data.thinking import MARKER
from wgpu_lora.errors import UserError


def without_thinking(text: str) -> str:
    """The text without its reasoning, which may be nested. A text that only ends its reasoning began with it.

    Raises:
        UserError: the markers do not match, so that it is not known where the reasoning ends.
    """
    kept: list[str] = []
    depth = at = 0
    first = True
    for found in MARKER.finditer(text):
        closes = bool(found["close"] or found["end"] or found["stop"])
        if not closes:
            if not depth:
                kept.append(text[at : found.start()])
            depth += 1
        elif depth:
            depth -= 1
        elif first:  # the chat template has written the opening marker
            kept.clear()
        else:
            raise UserError(f"{found[0]!r} closes no reasoning; remove it.")
        at, first = found.end(), False
    if depth:
        raise UserError("its reasoning is not closed, so it is not known where the answer begins; close or remove it.")
    if first:
        return text
    return "".join([*kept, text[at:]]).strip()
