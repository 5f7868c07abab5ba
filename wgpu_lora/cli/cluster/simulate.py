"""wgpu-lora cluster simulate: how well adapters would be placed on a cluster with failures, in virtual time."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from wgpu_lora.cli.console import duration, line, print_json
from wgpu_lora.cli.parameters import Json
from wgpu_lora.words import count_noun, percent

if TYPE_CHECKING:
    from wgpu_lora.cluster.placement.simulation.run import Outcome


def simulate(
    adapters: Annotated[int, typer.Option("--adapters", min=1, max=100_000, help="Adapters to train.")] = 1000,
    devices: Annotated[int, typer.Option("--devices", min=1, max=10_000, help="Devices, of all kinds in turn.")] = 64,
    bench: Annotated[
        list[Path] | None,
        typer.Option(
            "--bench",
            metavar="FILE",
            help="Result file of 'bench --brick device_speed --json' on a kind of device; may be given several "
            "times. Default: lavapipe, as measured, and devices that are 2, 4 and 8 times as fast.",
        ),
    ] = None,
    crashes: Annotated[
        float, typer.Option("--crashes", min=0, max=1000, help="Crashes per day, of each device's worker.")
    ] = 2.0,
    outages: Annotated[
        float, typer.Option("--outages", min=0, max=50, help="Outages per day, of each host of four devices.")
    ] = 0.5,
    join: Annotated[
        Literal["auto", "always", "never"], typer.Option("--join", help="Whether tasks of one base are joined.")
    ] = "auto",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of what is drawn.")] = 0,
    as_json: Json = False,
) -> None:
    """Simulate a cluster with the placement that clusters use.

    Adapters, memory and failures are drawn; speeds are measured. Prints how long all adapters take, and the time before
    which no placement can have ended them.
    """
    from wgpu_lora.cluster.placement.simulation.measured import read_measured
    from wgpu_lora.cluster.placement.simulation.run import simulate as simulated
    from wgpu_lora.cluster.placement.simulation.scenario import Scenario

    kinds = read_measured(bench or [])
    scenario = Scenario(adapters, devices, crashes=crashes, outages=outages, join=join, seed=seed)
    outcome = simulated(scenario, kinds)
    if as_json:
        print_json(_facts(outcome))
        return
    for kind in kinds:
        line("kind", f"{kind.name}: {kind.speed:,.0f} tokens/s, {kind.joined_speedup:.2f} times as many in pipelines")
    line("makespan", duration(outcome.makespan))
    line("bound", f"{duration(outcome.bound)}, before which no placement can have ended all of them")
    line("ratio", f"{outcome.makespan / outcome.bound:.3f}")
    again = f"{percent(outcome.lost_share)} of the tokens trained again"
    line("failures", f"{count_noun(outcome.failures, 'unit')} moved, {again}")
    line("joined", f"{count_noun(outcome.joined, 'placement')} of adapters in pipelines")
    middle, longest = median(outcome.decisions) * 1e3, max(outcome.decisions) * 1e3
    count = len(outcome.decisions)
    line("decisions", f"{count:,}, median {middle:.1f} ms, longest {longest:.1f} ms of processor time")


def _facts(outcome: Outcome) -> dict[str, float]:
    return {
        "makespan_seconds": outcome.makespan,
        "bound_seconds": outcome.bound,
        "ratio": outcome.makespan / outcome.bound,
        "failures": outcome.failures,
        "lost_share": outcome.lost_share,
        "joined": outcome.joined,
        "decisions": len(outcome.decisions),
        "decision_median_seconds": median(outcome.decisions),
        "decision_longest_seconds": max(outcome.decisions),
    }
