"""wgpu-lora cluster down: everything that belongs to a cluster is ended."""

from __future__ import annotations

from wgpu_lora.cli.cluster.options import ClusterToml, Here
from wgpu_lora.cli.console import line
from wgpu_lora.errors import UserError
from wgpu_lora.installation import program


def down(file: ClusterToml = None, local: Here = False) -> None:
    """End Ray and all jobs on the hosts of a cluster file, or on this machine. Checkpoints and results stay."""
    from wgpu_lora.cluster.client.local import end_local
    from wgpu_lora.cluster.coordinator.journal import DIRECTORY, unfinished
    from wgpu_lora.cluster.extra import check_ray
    from wgpu_lora.cluster.launcher.commands import down
    from wgpu_lora.cluster.node.layout import cluster_root
    from wgpu_lora.cluster.spec.file import read_cluster_file

    if local is (file is not None):
        raise UserError("Give either -f cluster.toml or --local: the cluster to end.")
    if file is None:
        ended = end_local()
        line("ended", "Ray on this machine" if ended else "nothing: Ray does not run on this machine")
        if ended and (left := unfinished(cluster_root() / DIRECTORY)):
            line("unfinished", f"{', '.join(left)}: '{program()} cluster attach --local' goes on")
        return
    check_ray()
    down(read_cluster_file(file), line)
