"""Parcels of data between hosts, through their actors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from wgpu_lora.cluster.facts import from_plain
from wgpu_lora.cluster.node.remote import call, host_name
from wgpu_lora.cluster.node.sent import Sent
from wgpu_lora.cluster.node.transfer import Unreachable
from wgpu_lora.cluster.spec.sending import Parcel
from wgpu_lora.errors import UserError

COMMIT_SECONDS = 900.0  # that checking the digests of a large parcel may take


def obtain(sent: Sent, digest: str, nodes: Sequence[str]) -> None:
    """Get a parcel that this host lacks from the first of these nodes that has it and answers.

    Raises:
        Unreachable: none of them answers. UserError: none has it, or it cannot be written here.
    """
    if sent.has(digest):
        return
    wrong: Exception = UserError(f"The data {digest:.12} have not been sent to this host: start the run again.")
    for node in nodes:
        try:
            _pull(sent, digest, node)
            return
        except (Unreachable, UserError) as error:
            if not isinstance(wrong, Unreachable):  # which may pass
                wrong = error
    raise wrong


def _pull(sent: Sent, digest: str, node: str) -> None:
    name = host_name(node)
    parcel = from_plain(Parcel, call(name, "parcel", digest))
    files = {file.digest: file for file in parcel.files}
    for file, have in sent.begin(parcel).items():
        while have < files[file].size or not files[file].size:
            data = call(name, "read_sent", digest, files[file].path, have)
            sent.put(digest, file, have, data)
            have += len(data)
            if not data:
                break
    sent.commit(parcel)


def push(sent: Sent, parcel: Parcel, node: str) -> None:
    """Give a parcel of this host to another node's host. Raises Unreachable or UserError."""
    name = host_name(node)
    if call(name, "sent", parcel.digest):
        return
    files = {file.digest: file for file in parcel.files}
    for file, have in call(name, "begin_sent", asdict(parcel)).items():
        while True:
            data = sent.read(parcel.digest, files[file].path, have)
            call(name, "put_sent", parcel.digest, file, have, data)
            have += len(data)
            if have >= files[file].size or not data:
                break
    call(name, "commit_sent", asdict(parcel), seconds=COMMIT_SECONDS)
