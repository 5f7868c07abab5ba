"""What is wrong with a run, all of it at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from wgpu_lora.errors import UserError

MOST_SAID = 20  # refusals that are listed


@dataclass
class Refusals:
    """What is wrong, by sentence; equal ones count once."""

    said: dict[str, None] = field(default_factory=dict)

    def add(self, *sentences: str) -> None:
        self.said.update(dict.fromkeys(sentences))

    def settle(self) -> None:
        """Raise UserError if there are any."""
        if not self.said:
            return
        found = list(self.said)
        if len(found) == 1:
            raise UserError(found[0])
        rest = len(found) - MOST_SAID
        more = [f"and {rest:,} more"] if rest > 0 else []
        raise UserError(f"The run is refused for {len(found):,} reasons: mend them all.", [*found[:MOST_SAID], *more])
