"""wgpu-lora cluster: adapters trained on the GPUs of several machines."""

from __future__ import annotations

import typer

from wgpu_lora.cli.cluster.cluster_commands import (
    RunCommand,
    SweepCommand,
    attach,
    cancel,
    down,
    release,
    resources,
    run,
    status,
    sweep,
    up,
)
from wgpu_lora.cli.command import Command, Group

cluster = typer.Typer(
    cls=Group,
    name="cluster",
    help="Train adapters on the GPUs of several machines, on Ray.",
    rich_markup_mode=None,
    invoke_without_command=True,
)


@cluster.callback()
def _root(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


# In the order in which they are used.
cluster.command(cls=Command)(up)
cluster.command("run", cls=RunCommand)(run)
cluster.command("sweep", cls=SweepCommand)(sweep)
cluster.command(cls=Command)(status)
cluster.command(cls=Command)(attach)
cluster.command(cls=Command)(cancel)
cluster.command(cls=Command)(release)
cluster.command(cls=Command)(down)
cluster.command(cls=Command)(resources)
