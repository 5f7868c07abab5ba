"""wgpu-lora cluster up: Ray on the hosts of a cluster.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wgpu_lora.cli.console import line

File = Annotated[Path, typer.Option("--file", "-f", metavar="FILE", help="The cluster.toml that names the hosts.")]


def up(file: File) -> None:
    """Start Ray on the hosts of a cluster.toml.

    It is started by SSH, where it does not run yet. docs/cluster-hosts.md describes what the hosts need.
    """
    from wgpu_lora.cluster.extra import check_ray
    from wgpu_lora.cluster.launcher.commands import up
    from wgpu_lora.cluster.spec.file import read_cluster_file

    check_ray()
    up(read_cluster_file(file), line)
