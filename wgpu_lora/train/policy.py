"""Which adapters take the next step of a pipeline. A policy is one class here and its line in `POLICIES`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from wgpu_lora.train.state import RunState

PATIENCE = 4  # turns of everybody else that an adapter waits for at most


@dataclass(frozen=True)
class Standing:
    """A slot that still has work, and what its run has come to."""

    slot: int
    state: RunState

    @property
    def relative_loss(self) -> float:
        """The newest held-out loss by that of the beginning; infinite where it was never measured."""
        now, start = self.state.last_eval_loss, self.state.first_eval_loss
        return math.inf if now is None or not start else now / start


class Policy(Protocol):
    """What it remembers are dataclass fields that JSON can hold: resuming restores them.

    eval_steps: own steps between an adapter's held-out losses where --eval-steps does not say; 0: none are needed.
    """

    eval_steps: int

    def choose(self, live: Sequence[Standing]) -> list[int]:
        """The slots, ascending, that take the next step; `live` is never empty and ascending too."""


@dataclass
class Synchronized:
    """Every adapter that still has work takes each step."""

    eval_steps = 0

    def choose(self, live: Sequence[Standing]) -> list[int]:
        return [standing.slot for standing in live]


@dataclass
class RoundRobin:
    """One adapter a step, in turn."""

    eval_steps = 0
    last: int = -1

    def choose(self, live: Sequence[Standing]) -> list[int]:
        slots = [standing.slot for standing in live]
        self.last = next((slot for slot in slots if slot > self.last), slots[0])
        return [self.last]


@dataclass
class PriorityValLoss:
    """The adapter whose held-out loss has fallen least takes the step, unless another has waited too long."""

    eval_steps = 10
    waited: dict[str, int] = field(default_factory=dict)  # steps of others since a slot's own; JSON's keys are text

    def choose(self, live: Sequence[Standing]) -> list[int]:
        def waiting(standing: Standing) -> int:
            return self.waited.get(str(standing.slot), 0)

        patient = max(live, key=waiting)
        worst = max(live, key=lambda standing: (standing.relative_loss, waiting(standing)))
        chosen = patient if waiting(patient) >= PATIENCE * len(live) else worst
        self.waited = {str(s.slot): 0 if s is chosen else waiting(s) + 1 for s in live}
        return [chosen.slot]


POLICIES: dict[str, type[Any]] = {
    "synchronized": Synchronized,
    "round-robin": RoundRobin,
    "priority-val-loss": PriorityValLoss,
}


def policy_state(policy: Any) -> dict[str, Any]:
    return asdict(policy)


def make_policy(name: str, state: dict[str, Any] | None = None) -> Policy:
    """A policy by its name, as it was when `policy_state` was taken of it; ValueError for what it cannot have been."""
    kind = POLICIES[name]
    policy: Policy = kind()
    if state:
        fresh = policy_state(policy)
        alike = state.keys() == fresh.keys() and all(type(state[key]) is type(fresh[key]) for key in fresh)
        counts = (count for value in state.values() if isinstance(value, dict) for count in value.values())
        if not alike or not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError(f"{name} does not remember {state!r:.80}")
        policy = kind(**state)
    return policy
