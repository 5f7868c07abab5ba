"""The token of a cluster: Ray's nodes and drivers show it to each other. It travels by SSH only."""

from __future__ import annotations

import re
import secrets

from wgpu_lora.cluster.cluster_file import ClusterFile
from wgpu_lora.cluster.launcher.files import on_host
from wgpu_lora.cluster.launcher.ssh import quoted, run
from wgpu_lora.errors import UserError

_TOKEN = re.compile(r"[0-9a-f]{64}")


def new_token() -> str:
    """256 random bits, in hexadecimal."""
    return secrets.token_hex(32)


def token_of(spec: ClusterFile) -> str:
    """The token that the head of a running cluster has, read by SSH.

    Raises:
        UserError: the head cannot be reached, or the cluster is not up.
    """
    head = spec.head
    found = run(head, f"cat {quoted(on_host(spec.name, head) + '/token')}", check=False)
    token = found.stdout.strip()
    if found.returncode or not _TOKEN.fullmatch(token):
        raise UserError(
            f"The cluster {spec.name} is not up on {head.host}: start it with 'wgpu-lora cluster up -f {spec.path}'."
        )
    return token


def authentication(spec: ClusterFile) -> dict[str, str]:
    """What Ray reads from the environment to be let into a cluster; to be set before Ray is imported.

    Raises:
        UserError: the head cannot be reached, or the cluster is not up.
    """
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token_of(spec)}
