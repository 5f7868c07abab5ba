"""Data that only this machine has, sent to the machines that lack them, by content (`--send-data`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from wgpu_lora.cluster.client.asking import Asking
from wgpu_lora.cluster.facts import NodeFacts, Task
from wgpu_lora.cluster.node.shelf import PIECE
from wgpu_lora.cluster.spec.sending import Parcel, parcel, sendable, with_sent
from wgpu_lora.errors import UserError, reason


def send_lacking(
    cluster: Asking, nodes: Sequence[NodeFacts], tasks: Sequence[Task], lacking: Mapping[str, object]
) -> tuple[list[Task], set[str]]:
    """The tasks with what was sent in place of their paths, and these paths.

    All machines get them, since a task may move to any.

    Raises:
        UserError: a file cannot be read, is too large, or changes meanwhile, or a machine has no room.
    """
    paths = sendable(tasks, list(lacking))
    parcels = {path: parcel(path) for path in paths}
    for node in nodes:
        for path, one in parcels.items():
            send(cluster, f"host:{node.id}", Path(path), one)
    return with_sent(tasks, parcels), set(paths)


def send(cluster: Asking, host: str, path: Path, what: Parcel) -> None:
    """Send the files of a parcel that a host lacks. Raises UserError."""
    if cluster.call(host, "sent", what.digest):
        return
    missing = dict(cluster.call(host, "begin_sent", asdict(what)))  # bytes that are there already, by digest
    for file in what.files:
        at = missing.pop(file.digest, None)  # the same content under two names is sent once
        if at is None:
            continue
        source = path.parent / file.path
        try:
            with source.open("rb") as opened:
                opened.seek(at)
                first = True
                while (data := opened.read(PIECE)) or first:
                    cluster.call(host, "put_sent", what.digest, file.digest, at, data=data)
                    at, first = at + len(data), False
        except OSError as error:
            raise UserError(f"{source} cannot be read ({reason(error)}): restore it.") from None
    cluster.call(host, "commit_sent", asdict(what))
