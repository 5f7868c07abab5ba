"""The projected time of a run: options and output of `plan --measure` and `data stats`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from wgpu_lora.cli.console import console, duration, line, table

if TYPE_CHECKING:
    from wgpu_lora.train.measuring import Projection

Measure = Annotated[bool, typer.Option("--measure", help="Take a few steps, and project the time of the run.")]
PricePerHour = Annotated[float | None, typer.Option(help="Price of an hour on this device, for the cost of the run.")]


def show_projection(projection: Projection, price: float | None) -> None:
    """Print the stages of a run with their seconds and cost."""
    head = ("stage", "seconds", "share", *(() if price is None else ("cost",)))
    rows = [_row(stage, seconds, projection, price) for stage, seconds in projection.stages.items()]
    console().print(table(head, [*rows, _row("all", projection.total, projection, price)], ["stage"]))
    line("projected", f"{duration(projection.total)}, from {projection.timed} measured steps; saving is not counted")


def _row(stage: str, seconds: float, projection: Projection, price: float | None) -> tuple[str, ...]:
    cost = () if price is None else (f"{seconds / 3600 * price:,.4g}",)
    return stage, f"{seconds:,.1f}", f"{seconds / max(projection.total, 1e-9):.0%}", *cost


def as_facts(projection: Projection, price: float | None) -> dict[str, Any]:
    """A projection for JSON."""
    cost = {} if price is None else {"cost": projection.cost(price)}
    return {"stages": projection.stages, "seconds": projection.total, "timed_steps": projection.timed, **cost}
