"""The options of a sweep."""

from __future__ import annotations

from dataclasses import dataclass, fields

from wgpu_lora.train.option_types import Range, check, option

SWEEP = "Sweep"  # heading of its options in help
METRICS, SCHEDULERS = ("eval_loss", "loss"), ("none", "asha")
MOST = 10_000  # tasks


@dataclass(frozen=True)
class SweepOptions:
    """The options of `cluster sweep`, declared as those of training are.

    grace_period: None for a tenth of the shortest task's steps.
    """

    max_trials: int | None = option(
        None, SWEEP, "Draw so many of the combinations, by --seed. Default: all.", within=Range(1, at_most=MOST)
    )
    metric: str = option("eval_loss", SWEEP, "What the adapters are compared by; lower is better.", choices=METRICS)
    scheduler: str = option(
        "none", SWEEP, "What ends poor adapters early: nothing, or ASHA of Ray Tune.", choices=SCHEDULERS
    )
    grace_period: int | None = option(
        None, SWEEP, "With ASHA, the steps before an adapter may be ended. Default: a tenth.", within=Range(1)
    )
    reduction_factor: float = option(
        4.0, SWEEP, "With ASHA, one of so many goes on at each rung.", within=Range(above=1, at_most=1000)
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            check(item.name, getattr(self, item.name), item.metadata)
