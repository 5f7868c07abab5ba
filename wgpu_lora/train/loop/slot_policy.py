"""Which adapters take the next step of a pipeline. A policy is a class here and a line in `POLICIES`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from wgpu_lora.train.run.run_state import RunState

PATIENCE = 4  # rounds of all other adapters that an adapter waits at most


class Slot(Protocol):
    """The fields of a run that a policy reads."""

    slot: int
    state: RunState


def relative_loss(run: Slot) -> float:
    """The latest held-out loss relative to the first; infinite if not measured."""
    now, start = run.state.last_eval_loss, run.state.first_eval_loss
    return math.inf if now is None or not start else now / start


class Policy(Protocol):
    """The dataclass fields are the policy's state; resuming restores them, so they must be JSON values.

    together: whether several adapters take part in a step.
    eval_steps: an adapter's own steps between held-out losses, unless --eval-steps is given; 0 if none are needed.
    """

    together: bool
    eval_steps: int

    def choose(self, live: Sequence[Slot]) -> list[int]:
        """The slots that take the next step, ascending; `live` is ascending too, and not empty."""


@dataclass
class Synchronized:
    """Every adapter that still has work takes part in each step."""

    together = True
    eval_steps = 0

    def choose(self, live: Sequence[Slot]) -> list[int]:
        return [run.slot for run in live]


@dataclass
class RoundRobin:
    """One adapter per step, in turn."""

    together = False
    eval_steps = 0
    last: int = -1

    def choose(self, live: Sequence[Slot]) -> list[int]:
        slots = [run.slot for run in live]
        self.last = next((slot for slot in slots if slot > self.last), slots[0])
        return [self.last]


@dataclass
class PriorityValLoss:
    """The adapter whose held-out loss has improved least takes the step, unless another has waited too long."""

    together = False
    eval_steps = 10
    waited: dict[str, int] = field(default_factory=dict)  # steps since a slot took one; JSON keys are text

    def choose(self, live: Sequence[Slot]) -> list[int]:
        def waited_steps(run: Slot) -> int:
            return self.waited.get(str(run.slot), 0)

        patient = max(live, key=waited_steps)
        worst = max(live, key=lambda run: (relative_loss(run), waited_steps(run)))
        slot = patient if waited_steps(patient) >= PATIENCE * len(live) else worst
        self.waited = {str(s.slot): 0 if s is slot else waited_steps(s) + 1 for s in live}
        return [slot.slot]


POLICIES: dict[str, type[Any]] = {
    "synchronized": Synchronized,
    "round-robin": RoundRobin,
    "priority-val-loss": PriorityValLoss,
}


def policy_state(policy: Any) -> dict[str, Any]:
    return asdict(policy)


def make_policy(name: str, state: dict[str, Any] | None = None) -> Policy:
    """A policy by name, with a state that `policy_state` returned. Raises ValueError if the state is invalid."""
    kind = POLICIES[name]
    policy: Policy = kind()
    if state:
        fresh = policy_state(policy)
        alike = state.keys() == fresh.keys() and all(type(state[key]) is type(fresh[key]) for key in fresh)
        counts = (count for value in state.values() if isinstance(value, dict) for count in value.values())
        if not alike or not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError(f"{state!r:.80} is not a state of {name}")
        policy = kind(**state)
    return policy
