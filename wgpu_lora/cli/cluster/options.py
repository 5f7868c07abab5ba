"""Options that the commands of a cluster share: which cluster, and how a run uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from wgpu_lora.cli.parameters import TrainingCommand, given_options
from wgpu_lora.cluster.cluster_file import CLUSTER, RunOptions
from wgpu_lora.names.spelling import COMMAND_LINE, naming

if TYPE_CHECKING:
    from wgpu_lora.cluster.cluster_file import ClusterFile

Address = Annotated[
    str | None,
    typer.Option(
        help="Ray cluster that runs already. Default: RAY_ADDRESS, else Ray on this machine.",
        metavar="auto|HOST:PORT|ray://HOST:PORT",
        rich_help_panel=CLUSTER,
    ),
]
ClusterToml = Annotated[
    Path | None,
    typer.Option("--file", "-f", help="Cluster file.", metavar="cluster.toml", rich_help_panel=CLUSTER),
]
Here = Annotated[
    bool,
    typer.Option("--local", help="Use Ray of your own with the devices of this machine.", rich_help_panel=CLUSTER),
]
Detach = Annotated[
    bool,
    typer.Option("--detach", help="Return as soon as the run is accepted; see 'attach'.", rich_help_panel=CLUSTER),
]
Dashboard = Annotated[
    bool,
    typer.Option("--dashboard", help="With --local, start Ray's dashboard on this machine.", rich_help_panel=CLUSTER),
]


class RunCommand(TrainingCommand):
    """A command that trains on a cluster: --help shows its own options and the most common ones of training."""

    most_used: ClassVar[Sequence[str]] = (
        *("local", "file", "address", "adapters", "adapters_config", "recipe", "model", "data", "output"),
        *("name", "shared", "mirror_steps", "join", "data_parallel", "eval_device", "send_data", "detach"),
    )
    kinds: ClassVar[Sequence[type]] = (RunOptions,)


def run_options(ctx: typer.Context, file: ClusterFile | None) -> RunOptions:
    """How a run uses the cluster: as the command line says, else as [run] of the file does. Raises UserError."""
    with naming(COMMAND_LINE):
        return replace(file.run if file else RunOptions(), **given_options(ctx, RunOptions))
