"""Options that the commands of a cluster share: which cluster, and how a run uses it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from wgpu_lora.cli.parameters import TrainingCommand, is_given, option_parameter
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


def with_options(*kinds: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For a function with **options: the fields of these dataclasses become its parameters on the command line."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        declared = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [parameter for parameter in declared if parameter.kind is not parameter.VAR_KEYWORD]
        options = [option_parameter(item) for kind in kinds for item in fields(kind)]
        command.__signature__ = inspect.Signature([*parameters, *options])  # type: ignore[attr-defined]
        return command

    return decorate


def run_options(ctx: typer.Context, values: Mapping[str, Any], file: ClusterFile | None) -> RunOptions:
    """How a run uses the cluster: as the command line says, else as [run] of the file does. Raises UserError."""
    with naming(COMMAND_LINE):
        overrides = {item.name: values[item.name] for item in fields(RunOptions) if is_given(ctx, item.name)}
        return replace(file.run if file else RunOptions(), **overrides)
